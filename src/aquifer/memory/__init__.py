"""Physical pages and the addresses they appear at. Knows bytes only.

Glossary:
    page    physical memory of one fixed size, named by a driver handle
    range   reserved addresses, mapped page by page
    owner   a tenant (weights, KV, state, prefix) of one model
    budget  the bytes that all pages together may take, in use or idle
"""
