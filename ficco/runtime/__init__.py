"""The runtime of a group: how its ranks meet, its windows, calls and failures."""
