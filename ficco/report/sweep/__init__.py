"""The page of a sweep: what its folder says, what follows from it, how it is drawn and laid out."""
