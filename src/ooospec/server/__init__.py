"""An OpenAI-compatible server for one machine."""
