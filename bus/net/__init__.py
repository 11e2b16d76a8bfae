"""Sockets, requests to brokers, keys."""
