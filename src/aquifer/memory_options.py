"""Options of memory: the budget, caches, pages, and what is kept where when it is short."""

from __future__ import annotations

from aquifer.option import Option

PREDICTION_USES = ("admission", "victims", "cache")
"""What forecasts of lengths can be used for."""

OF_CACHES = {
    "block_size": ("paged", "bucketed", "avmp", "avmp-fixed", "avmp-padded"),
    "prompt_page_size": ("virtual",),
    "map_ahead": ("virtual",),
    "eager_pages": ("virtual", "paged"),
}
"""Options that other KV caches than these have no use for. They are allowed with all, so that one
command line serves to compare caches; a warning says that they have no effect."""

MEMORY_OPTIONS: tuple[Option, ...] = (
    Option(
        "memory",
        int,
        None,
        "Budget of the pool, weights included, and on a GPU all else that the process holds there.",
        unit="bytes",
        scopes=("serve", "run", "bench", "llm"),
        field="memory_bytes",
        minimum=1,
        example="4GiB",
        unset="a share of the GPU, or on a CPU the weights plus a quarter of free memory",
    ),
    Option(
        "gpu_memory_utilization",
        float,
        0.9,
        "Share of the GPU's memory to use if no memory budget is set.",
        unit="fraction",
        scopes=("serve", "run", "llm"),
        above=0,
        maximum=1,
    ),
    Option(
        "kv_cache",
        str,
        "virtual",
        "virtual (contiguous addresses), paged (block tables), bucketed (regions of predicted "
        "size); to compare: avmp and its variants.",
        scopes=("serve", "run", "bench", "llm"),
        choices=("virtual", "paged", "bucketed", "avmp", "avmp-fixed", "avmp-padded"),
    ),
    Option(
        "bucket_routing_threshold",
        float,
        0.75,
        "With kv_cache bucketed: uncertainty of a forecast above which a request gets memory for "
        "its longest output.",
        unit="fraction",
        scopes=("serve", "run", "llm"),
        minimum=0,
        maximum=1,
    ),
    Option(
        "bucket_inflation",
        float,
        0.1,
        "With kv_cache bucketed: a forecast length grows by this times its uncertainty.",
        unit="fraction",
        scopes=("serve", "run", "llm"),
        minimum=0,
    ),
    Option(
        "bucket_grouping",
        bool,
        False,
        "With kv_cache bucketed: of the next 32 requests, admit first one whose bucket has a free "
        "region.",
        scopes=("serve", "run", "llm"),
    ),
    Option(
        "bucket_bounds",
        str,
        "learned",
        "With kv_cache bucketed: sizes of the buckets, from the lengths of ended requests "
        "(learned), or ten of equal widths (equal; to compare).",
        scopes=("serve", "run", "llm"),
        choices=("learned", "equal"),
    ),
    Option(
        "bucket_memory",
        int,
        None,
        "With kv_cache bucketed: size of the memory for KV. It is taken at the start, like that of "
        "the weights, without the device's virtual memory, and kept; for one model.",
        unit="bytes",
        scopes=("serve", "run", "llm"),
        field="bucket_memory_bytes",
        minimum=1,
        example="12GiB",
        unset="pages that come and go with the requests",
    ),
    Option(
        "kv_layout",
        str,
        "token-major",
        "Order of KV: token-major (all layers of a token together) or layer-major (a buffer for K "
        "and one for V of each layer; to compare).",
        scopes=("serve", "run", "llm"),
        choices=("token-major", "layer-major"),
    ),
    Option(
        "page_size",
        int,
        None,
        "Size of a physical page.",
        unit="bytes",
        scopes=("serve", "run", "llm"),
        field="page_bytes",
        minimum=1,
        example="2MiB",
        unset="the device's own, or larger for a large budget",
    ),
    Option(
        "prompt_page_size",
        int,
        None,
        "Size of the largest pages for what a prompt fills: a multiple of --page-size, or the "
        "same.",
        unit="bytes",
        scopes=("serve", "run", "llm"),
        field="prompt_page_bytes",
        minimum=1,
        example="32MiB",
        unset="the device's size of large pages",
    ),
    Option(
        "map_ahead",
        str,
        None,
        "When pages for later tokens are mapped: by a thread of its own (background), in the step "
        "before (step), or not before they are needed (off).",
        scopes=("serve", "run", "llm"),
        choices=("background", "step", "off"),
        unset="background on a GPU, else step",
    ),
    Option(
        "eager_pages",
        int,
        8,
        "Pages to keep mapped for the next request that begins. With 0, none are mapped before the "
        "first requests of a server come, either.",
        unit="pages",
        scopes=("serve", "run", "llm"),
        minimum=0,
    ),
    Option(
        "reclaim_below",
        float,
        0.1,
        "Unmap the pages of ended requests once less than this share of the budget is free beside "
        "them; 1 for at once.",
        unit="fraction",
        scopes=("serve", "run", "llm"),
        minimum=0,
        maximum=1,
    ),
    Option(
        "guard_pages",
        bool,
        False,
        "Debug mode: memory that must not be read is NaN, and writes to freed pages are errors; "
        "slow on a GPU.",
        scopes=("serve", "run", "llm"),
    ),
    Option(
        "block_size",
        int,
        16,
        "Tokens in a block of the paged cache, and of the bucketed one.",
        unit="tokens",
        scopes=("serve", "run", "llm"),
        minimum=1,
    ),
    Option(
        "enable_prefix_caching",
        bool,
        True,
        "Keep computed KV, while memory is free, for prompts that begin with the same tokens.",
        scopes=("serve", "llm"),
    ),
    Option(
        "prefix_cache_salt_by_key",
        bool,
        None,
        "Share cached prefixes only between requests with the same API key.",
        scopes=("serve",),
        unset="on with several keys",
    ),
    Option(
        "swap_space",
        int,
        4 << 30,
        "Host memory for the KV of preempted sequences; 0 for none.",
        unit="bytes",
        scopes=("serve", "llm"),
        field="swap_space_bytes",
        minimum=0,
    ),
    Option(
        "keep_alive",
        float,
        None,
        "Unload a model that nothing has used for so long; a request may say another time.",
        unit="duration",
        scopes=("serve",),
        field="keep_alive_s",
        minimum=0,
        may_be_infinite=True,
        example="5m",
        unset="as long as nothing else needs its memory",
    ),
    Option(
        "host_cache",
        int,
        None,
        "Host memory for weights that are not on the device, or may have to leave it; 0 for none.",
        unit="bytes",
        scopes=("serve", "llm"),
        field="host_cache_bytes",
        minimum=0,
        example="64GiB",
        unset="half of the host's free memory for several models on a GPU, else none",
    ),
    Option(
        "peer_weights",
        bool,
        None,
        "Copy weights that another device of the machine has from there, not from the host.",
        scopes=("serve",),
        unset="on with several devices",
    ),
    Option(
        "preemption_mode",
        str,
        "auto",
        "What to do with preempted KV: swap (to the host), recompute, or auto (the cheaper one).",
        scopes=("serve", "llm"),
        choices=("auto", "swap", "recompute"),
    ),
    Option(
        "length_prediction",
        str,
        "off",
        "Forecast how long outputs will be, so that preemption is rare: off, prior (by recent "
        "outputs), oracle (each as long as its max_tokens), or the folder of a trained predictor.",
        unit="name or folder",
        scopes=("serve", "llm"),
    ),
    Option(
        "prediction_uses",
        str,
        (),
        "What forecasts are used for: admission, victims of preemption, or cache (how far to map "
        "ahead, which bucket); repeat it for several.",
        scopes=("serve", "llm"),
        choices=PREDICTION_USES,
        unset="all of them",
        many=True,
    ),
)
"""A part of `aquifer.options.OPTIONS`."""
