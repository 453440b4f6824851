"""Reports: tables, text timelines, traces. They present measurements and decide nothing."""
