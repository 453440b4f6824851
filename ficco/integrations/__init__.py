"""What other frameworks load of ficco, by their own ways to plug in; one module for each framework.

`import ficco` loads none of them, and this package loads no framework.
"""
