"""vLLM, driven by our command line and drafting with our proposers.

    mapping.py     our options as vLLM's: the speculative configuration and the command line
    proposers.py   our look-ups as vLLM's custom proposer class (imported by vLLM's workers)
    mailbox.py     how a request's prediction reaches those
    build.py       which build it is, and what that one cannot do exactly
    child.py       the vLLM process: started, watched, ended
    front.py       what clients talk to: our health, drain and error conventions before vLLM
    command.py     `outrider serve --backend vllm`

Nothing here imports vLLM: it runs in processes of its own, in an environment of its own if need be.
"""
