"""The fault table: each row breaks a private cluster in one way, with every check on and again with the check off."""
