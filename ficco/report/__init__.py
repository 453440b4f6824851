"""Reports: tables, text timelines, traces. They show what others measured and decide nothing."""
