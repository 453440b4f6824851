"""Plugins and overrides for other frameworks; `import ficco` imports none of them."""
