"""vLLM, driven by our command line and drafting with our proposers.

    mapping.py     our options as vLLM's: the speculative configuration and the command line
    proposers.py   our look-ups as vLLM's custom proposer class (imported by vLLM's workers)
    mailbox.py     passes a request's prediction to these
    build.py       recognises vLLM's build, and what this build cannot do exactly
    child.py       the vLLM process: started, watched, ended
    front.py       the HTTP server before vLLM, with our health, drain and error conventions
    command.py     `outrider serve --backend vllm`

Nothing here imports vLLM: it runs in other processes, and may run in another Python environment.
"""
