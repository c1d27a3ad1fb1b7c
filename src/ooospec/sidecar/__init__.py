"""The small model that predicts meanings: protocol, client, process, server, wave."""
