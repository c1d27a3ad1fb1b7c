"""Sources of drafts. Import no torch and never touch the model."""
