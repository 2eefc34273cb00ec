"""HTTP server: the web process with OpenAI's API, and the engine process that owns the device.

    HTTP --> app -> endpoints -> generation -> client -> link ==pipe== process -> Engine
             web process, no torch                               |  engine process

The web process handles text, the engine process tokens; only token ids cross the pipe.
"""
