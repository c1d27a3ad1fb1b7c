"""Text side of a request: templates, schemas, call formats, drafting. Imports no torch."""
