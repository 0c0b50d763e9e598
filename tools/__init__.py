"""Programs that look at the other rooms from outside: `python -m ultraflash.tools.<name> --help`.

Nothing imports from here. `local_server` and `chat_client` are shared by those that talk to a
server.
"""
