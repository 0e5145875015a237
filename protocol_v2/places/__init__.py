"""Places: the loop's half of each tier, and how objects are read from all of them.

    base      what a place is, and one planned read
    flow      bytes under way, bounded
    presence  which shards of which chunks are in memory or on disk
    faults    why chunks that were there are not
    indexed   what memory and disk have in common
    memory    objects in this process
    disk      files: what is written, what is being written, what has to go
    remote    a store that many servers share: asked before lookups, sent to behind stores
    questions what it is asked before lookups
    knowledge what is known of it, with dates
    outbox    what is on its way to it
    portions  a sequence in parts of bounded size
    reading   a range of objects from wherever they are, verified, counted

A tier (`protocol_v2.tiers`) does I/O and blocks; a place belongs to the loop, decides, and never blocks.
"""
