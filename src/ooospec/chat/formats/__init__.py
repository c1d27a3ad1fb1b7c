"""Call formats: one scanner and one set of styles each."""
