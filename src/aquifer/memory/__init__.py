"""Physical pages and the addresses they appear at. Knows bytes only.

Glossary:
    handle     a driver's own name of a physical page, known to `driver` and `pages` alone
    page       physical memory of one fixed size, named by a logical number
    range      reserved addresses, mapped page by page
    owner      a tenant (weights, KV, state, prefix) of one model
    residency  an owner's pages under the addresses of a range
    budget     the bytes that all pages together may take, in use or idle
"""
