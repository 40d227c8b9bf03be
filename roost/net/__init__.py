"""HTTP clients and servers, ports and rendezvous stores."""
