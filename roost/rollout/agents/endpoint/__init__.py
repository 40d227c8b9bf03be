"""Protocols of the recording endpoint: each is translated to one internal request and from one internal reply."""
