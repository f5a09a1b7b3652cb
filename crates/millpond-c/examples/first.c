/* Writes a file and reads it back. */
#include <fcntl.h>
#include <millpond.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    struct millpond_open_options options = {0};
    struct millpond_engine engine;
    struct millpond_file file;
    char buffer[64];
    int error = millpond_engine_create(NULL, &engine);

    options.size = sizeof options;
    options.flags = O_RDWR | O_CREAT;
    if (!error)
        error = millpond_open(engine, "pond.txt", &options, &file);
    if (!error)
        error = (int)millpond_write(file, "a pond\n", 7, 0);
    if (error >= 0)
        error = (int)millpond_read(file, buffer, sizeof buffer, 0);
    if (error >= 0) {
        printf("%.*s", error, buffer);
        error = millpond_close(file); /* returns the error of the write-back, too */
    }
    if (error < 0) {
        millpond_error_text(buffer, sizeof buffer);
        fprintf(stderr, "%s: %s\n", strerror(-error), buffer);
    }
    return error < 0;
}
