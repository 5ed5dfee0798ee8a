/* Says one message to a control socket and prints the answer: what kvmpoold's control.py does, where no Python is. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char answer[65536];
    ssize_t length;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    if (argc != 3)
        return 2;
    snprintf(address.sun_path, sizeof address.sun_path, "%s", argv[1]);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) || send(fd, argv[2], strlen(argv[2]), 0) < 0 ||
        (length = recv(fd, answer, sizeof answer, 0)) <= 0) {
        perror(argv[1]);
        return 1;
    }
    printf("%.*s\n", (int)length, answer);
    return 0;
}
