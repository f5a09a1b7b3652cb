/* A key-value store: a log of records, and an index of the latest record of each key.
 *
 *     cc kv.c -o kv $(pkg-config --cflags --libs millpond)
 *     ./kv store.log set pond frog ; ./kv store.log get pond ; ./kv store.log all
 *
 * A record is one append. A record that a power cut left incomplete fails its checksum, and is truncated. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <millpond.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 4096, KEY_MAX = 255 };

struct header {
    uint32_t checksum, key_len, value_len; /* of all that follows it; value_len DELETED: no value */
};
#define DELETED UINT32_MAX

struct entry {
    struct entry *next;
    uint64_t value_at;
    uint32_t value_len;
    char key[KEY_MAX + 1];
};

struct store {
    struct millpond_engine engine;
    struct millpond_file log;
    struct entry *buckets[BUCKETS];
};

static uint32_t checksum(uint32_t sum, const void *bytes, size_t len) {
    const unsigned char *at = (const unsigned char *)bytes;
    while (len-- > 0)
        sum = (sum ^ *at++) * 16777619u;
    return sum;
}

static struct entry **find(struct store *store, const char *key) {
    struct entry **at = &store->buckets[checksum(0, key, strlen(key)) % BUCKETS];
    while (*at && strcmp((*at)->key, key) != 0)
        at = &(*at)->next;
    return at;
}

static int put(struct store *store, const char *key, uint64_t value_at, uint32_t value_len) {
    struct entry **at = find(store, key), *entry = *at;
    if (value_len == DELETED) {
        if (entry) {
            *at = entry->next;
            free(entry);
        }
        return 0;
    }
    if (!entry) {
        entry = (struct entry *)calloc(1, sizeof *entry);
        if (!entry)
            return -ENOMEM;
        strcpy(entry->key, key);
        entry->next = *at;
        *at = entry;
    }
    entry->value_at = value_at;
    entry->value_len = value_len;
    return 0;
}

/* Whether the record at `at` is complete: compares its checksum. Less than 0: an error. */
static int is_whole(struct store *store, const struct header *header, const char *key, uint64_t at,
                    uint64_t end) {
    char part[65536];
    uint32_t left = header->value_len == DELETED ? 0 : header->value_len;
    uint32_t sum = checksum(0, &header->key_len, 2 * sizeof header->key_len);
    if (left > end - at)
        return 0;
    sum = checksum(sum, key, header->key_len);
    while (left > 0) {
        size_t now = left < sizeof part ? left : sizeof part;
        int64_t moved = millpond_read(store->log, part, now, at);
        if (moved != (int64_t)now)
            return moved < 0 ? (int)moved : 0;
        sum = checksum(sum, part, now);
        left -= (uint32_t)now;
        at += now;
    }
    return sum == header->checksum;
}

static int kv_open(struct store *store, const char *path) {
    struct millpond_open_options options = {0};
    struct header header;
    char key[KEY_MAX + 1];
    uint64_t at = 0, end;
    int error = millpond_engine_create(NULL, &store->engine);
    if (error)
        return error;
    options.size = sizeof options;
    options.flags = O_RDWR | O_CREAT;
    error = millpond_open(store->engine, path, &options, &store->log);
    if (error)
        return error;
    end = (uint64_t)millpond_len(store->log);
    while (at < end) {
        struct iovec parts[2];
        uint64_t value_at;
        int whole;
        int64_t moved;
        parts[0].iov_base = &header, parts[0].iov_len = sizeof header;
        parts[1].iov_base = key, parts[1].iov_len = KEY_MAX;
        moved = millpond_readv(store->log, parts, 2, at);
        if (moved < 0)
            return (int)moved;
        if ((size_t)moved < sizeof header || header.key_len > KEY_MAX ||
            header.key_len > (size_t)moved - sizeof header)
            break;
        key[header.key_len] = 0;
        value_at = at + sizeof header + header.key_len;
        whole = is_whole(store, &header, key, value_at, end);
        if (whole < 0)
            return whole;
        if (!whole)
            break;
        error = put(store, key, value_at, header.value_len);
        if (error)
            return error;
        at = value_at + (header.value_len == DELETED ? 0 : header.value_len);
    }
    return at < end ? millpond_truncate(store->log, at) : 0;
}

/* `value` NULL: delete. */
static int kv_set(struct store *store, const char *key, const char *value) {
    struct header header;
    struct iovec parts[3];
    uint64_t at;
    int64_t moved;
    size_t value_len = value ? strlen(value) : 0;
    if (strlen(key) > KEY_MAX || value_len >= DELETED)
        return -EINVAL;
    header.key_len = (uint32_t)strlen(key);
    header.value_len = value ? (uint32_t)value_len : DELETED;
    header.checksum = checksum(0, &header.key_len, 2 * sizeof header.key_len);
    header.checksum = checksum(header.checksum, key, header.key_len);
    header.checksum = checksum(header.checksum, value, value_len);
    parts[0].iov_base = &header, parts[0].iov_len = sizeof header;
    parts[1].iov_base = (void *)key, parts[1].iov_len = header.key_len;
    parts[2].iov_base = (void *)value, parts[2].iov_len = value_len;
    moved = millpond_appendv(store->log, parts, 3, &at);
    if (moved != (int64_t)(sizeof header + header.key_len + value_len))
        return moved < 0 ? (int)moved : -ENOSPC;
    return put(store, key, at + sizeof header + header.key_len, header.value_len);
}

/* The caller frees the result. NULL on failure, with the reason at `error`; 0: there is no such key. */
static char *kv_get(struct store *store, const char *key, int *error) {
    struct entry *entry = *find(store, key);
    char *value = entry ? (char *)calloc(1, (size_t)entry->value_len + 1) : NULL;
    int64_t moved;
    *error = entry && !value ? -ENOMEM : 0;
    if (!value)
        return NULL;
    moved = millpond_read(store->log, value, entry->value_len, entry->value_at);
    if (moved == (int64_t)entry->value_len)
        return value;
    *error = moved < 0 ? (int)moved : -EIO;
    free(value);
    return NULL;
}

int main(int count, char **words) {
    static struct store store;
    const char *verb = count > 2 ? words[2] : "";
    char why[256] = "usage: kv LOG set KEY VALUE | get KEY | delete KEY | all";
    int error = count > 2 ? kv_open(&store, words[1]) : -EINVAL;
    if (!error && count == 5 && strcmp(verb, "set") == 0)
        error = kv_set(&store, words[3], words[4]);
    else if (!error && count == 4 && strcmp(verb, "delete") == 0)
        error = kv_set(&store, words[3], NULL);
    else if (!error && count == 4 && strcmp(verb, "get") == 0) {
        char *value = kv_get(&store, words[3], &error);
        puts(value ? value : "(none)");
        free(value);
    } else if (!error && count == 3 && strcmp(verb, "all") == 0) {
        for (int bucket = 0; bucket < BUCKETS; bucket++)
            for (struct entry *entry = store.buckets[bucket]; entry; entry = entry->next)
                printf("%s: %" PRIu32 " bytes at %" PRIu64 "\n", entry->key, entry->value_len, entry->value_at);
    } else if (!error)
        error = -EINVAL;
    if (!error)
        error = millpond_sync_data(store.log);
    if (!error)
        return -millpond_close(store.log);
    millpond_error_text(why, sizeof why);
    fprintf(stderr, "kv: %s: %s\n", strerror(-error), why);
    return 1;
}
