"""The command ``extra-keys``: the one place that sees all packages, and so injects compat where a server is to have it.

app          the commands and their options
failures     user mistakes as one line and an exit code, without a traceback
screen       where output goes, and texts of others made fit for it
places       default folders and addresses
sizes        "4GiB" to bytes and back
captured     requests captured from a real engine
demo         the main job, end to end
"""
