"""The `kvmpool` command: what administrators type. Talks to kvmpoold through api/client.py only."""
