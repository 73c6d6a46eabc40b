"""Another program that listens on port `argv[1]`: it greets whoever connects, as sshd does."""

import socket
import sys

with socket.create_server(("", int(sys.argv[1]))) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
            connection.recv(1000)
