/*
 * Stands in for libFuzzer: gives every file of the folders on the command line to a fuzz target,
 * once. Makes the corpus an ordinary test for any compiler. Must not know what the target reads.
 */
#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The copy has exactly the file's size, so that a read past its end is seen by a sanitizer. */
static int replay_file(const char *path, size_t size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(size ? size : 1);
    int failed = !file || !data || fread(data, 1, size, file) != size;
    if (failed) {
        fprintf(stderr, "%s: cannot be read\n", path);
    } else {
        LLVMFuzzerTestOneInput(data, size);
    }
    free(data);
    if (file) {
        fclose(file);
    }
    return failed;
}

static int replay_folder(const char *folder)
{
    DIR *dir = opendir(folder);
    if (!dir) {
        fprintf(stderr, "%s: not a folder\n", folder);
        return 1;
    }
    int failures = 0, files = 0;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[4096];
        struct stat info;
        int length = snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (length < 0 || (size_t)length >= sizeof path || stat(path, &info) ||
            !S_ISREG(info.st_mode)) {
            continue;
        }
        failures += replay_file(path, (size_t)info.st_size);
        files++;
    }
    closedir(dir);
    printf("%s: %d inputs, %d unreadable\n", folder, files, failures);
    return failures || !files;
}

int main(int argc, char **argv)
{
    int failures = argc < 2;
    for (int i = 1; i < argc; i++) {
        failures += replay_folder(argv[i]);
    }
    return failures ? 1 : 0;
}
