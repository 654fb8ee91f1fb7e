"""Who proposes tokens that a next step verifies, one file each, and who decides how many of them it does."""
