//! Snapshots as text: for people, and in Prometheus' format.

use std::fmt::Write as _;

use super::engines::{LatencySnapshot, Watched};
use crate::printable::printable;

/// The exported values: our name, Prometheus' name, whether the value only grows, and the help text.
pub const METRICS: &[(&str, &str, bool, &str)] = &[
    ("hits", "millpond_hits_total", true, "Pages (of a run: reads) served from the cache."),
    ("misses", "millpond_misses_total", true, "Pages (of a run: reads) not found in the cache."),
    ("fills", "millpond_fills_total", true, "Pages brought into the cache."),
    ("evictions", "millpond_evictions_total", true, "Pages evicted."),
    ("bytes_served", "millpond_bytes_served_total", true, "Bytes moved for callers."),
    ("memory_bytes", "millpond_memory_bytes", false, "Memory in use; counts against the limit."),
    ("limit_bytes", "millpond_limit_bytes", false, "The memory limit."),
    ("dirty_bytes", "millpond_dirty_bytes", false, "Bytes of dirty pages."),
    ("writeback_bytes", "millpond_writeback_bytes", false, "Bytes of pages under write-back."),
    ("unsynced_bytes", "millpond_unsynced_bytes", false, "Bytes written that no sync has covered."),
    ("waiting_reads", "millpond_waiting_reads", false, "Reads that wait for a free slot."),
    ("waiting_writers", "millpond_waiting_writers", false, "Writers that wait for write-back."),
    ("objects_requests", "millpond_objects_requests_total", true, "Requests to an object store."),
    (
        "objects_requests_saved",
        "millpond_objects_requests_saved_total",
        true,
        "Calls without a request.",
    ),
    (
        "objects_bytes_from_store",
        "millpond_objects_received_bytes_total",
        true,
        "Bytes received from the store.",
    ),
    ("objects_count", "millpond_objects", false, "Objects with cached data."),
    ("objects_disk_hits", "millpond_objects_disk_hits_total", true, "Pages read from the disk."),
    ("objects_disk_bytes_written", "millpond_objects_disk_written_bytes_total", true, "Written."),
    ("objects_disk_errors", "millpond_objects_disk_errors_total", true, "Errors of the disk."),
    ("serve_clients", "millpond_serve_clients", false, "Clients attached to a server."),
    ("serve_attached", "millpond_serve_attached_total", true, "Clients attached so far."),
    ("serve_refused", "millpond_serve_refused_total", true, "Connections that were refused."),
    ("serve_requests", "millpond_serve_requests_total", true, "Requests of clients to a server."),
    (
        "serve_bypassed",
        "millpond_serve_bypassed_total",
        true,
        "Reads that a server left to the client's own store.",
    ),
    ("serve_failed", "millpond_serve_failed_total", true, "Requests of clients that failed."),
    ("files", "millpond_files_total", true, "Files that processes of a run opened."),
    ("served_files", "millpond_files_served_total", true, "Of these, files that were served."),
    ("adoptions", "millpond_adoptions_total", true, "Times that a file was served."),
    (
        "read_served_bytes",
        "millpond_read_served_bytes_total",
        true,
        "Bytes of reads that the engine served.",
    ),
    (
        "read_kernel_bytes",
        "millpond_read_kernel_bytes_total",
        true,
        "Bytes of reads that the kernel served.",
    ),
];
/// Requests of an S3 endpoint: values of the names `endpoint_KIND_CLASS`.
pub const ENDPOINT_METRIC: &str = "millpond_endpoint_requests_total";
pub const LATENCY_METRIC: &str = "millpond_latency_seconds";

pub fn prometheus(all: &[Watched]) -> String {
    let mut text = String::new();
    for (name, metric, only_grows, help) in METRICS {
        let kind = if *only_grows { "counter" } else { "gauge" };
        let _ = writeln!(text, "# HELP {metric} {help}\n# TYPE {metric} {kind}");
        for one in all {
            if let Some(value) = one.values.get(*name) {
                let _ = writeln!(text, "{metric}{{{}}} {value}", labels(one));
            }
        }
    }
    let help = "Requests to an S3 endpoint, by kind and class of the status.";
    let _ = writeln!(text, "# HELP {ENDPOINT_METRIC} {help}\n# TYPE {ENDPOINT_METRIC} counter");
    for one in all {
        for (kind, class, value) in endpoint_requests(one) {
            let labels = format!("{},request=\"{kind}\",status=\"{class}\"", labels(one));
            let _ = writeln!(text, "{ENDPOINT_METRIC}{{{labels}}} {value}");
        }
    }
    let help = "Durations of operations; some kinds are sampled.";
    let _ = writeln!(text, "# HELP {LATENCY_METRIC} {help}\n# TYPE {LATENCY_METRIC} histogram");
    for one in all {
        for (kind, latency) in &one.latencies {
            let kind = escaped(kind);
            buckets(&mut text, &format!("{},operation=\"{kind}\"", labels(one)), latency);
        }
    }
    text
}

fn buckets(text: &mut String, labels: &str, latency: &LatencySnapshot) {
    // Fixed bounds, as Prometheus requires: powers of four, from 64 ns to 4.6 minutes.
    for bound_ns in (3..=19).map(|power| 1_u64 << (2 * power)) {
        let below = latency.buckets.iter().filter(|(upper_ns, _)| *upper_ns < bound_ns);
        let below: u64 = below.map(|(_, count)| count).sum();
        let bound = bound_ns as f64 / 1e9;
        let _ = writeln!(text, "{LATENCY_METRIC}_bucket{{{labels},le=\"{bound}\"}} {below}");
    }
    let LatencySnapshot { count, sum_ns, .. } = latency;
    let _ = writeln!(text, "{LATENCY_METRIC}_bucket{{{labels},le=\"+Inf\"}} {count}");
    let _ = writeln!(text, "{LATENCY_METRIC}_sum{{{labels}}} {}", *sum_ns as f64 / 1e9);
    let _ = writeln!(text, "{LATENCY_METRIC}_count{{{labels}}} {count}");
}

fn labels(one: &Watched) -> String {
    let word = one.program.split(' ').next().unwrap_or_default();
    let name = word.rsplit('/').next().unwrap_or_default();
    let name = escaped(name);
    format!("kind=\"{}\",pid=\"{}\",engine=\"{}\",program=\"{name}\"", one.kind, one.pid, one.id)
}

/// Escapes text for the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The share of hits among the reads, in percent.
pub fn hit_rate(hits: u64, misses: u64) -> String {
    match hits.saturating_add(misses) {
        0 => "-".into(),
        all => format!("{:.1}%", 100.0 * hits as f64 / all as f64),
    }
}

pub fn duration(ns: u64) -> String {
    match ns {
        0 => "-".into(),
        1..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{} µs", ns / 1000),
        _ => format!("{} ms", ns / 1_000_000),
    }
}

pub fn size(bytes: u64) -> String {
    match bytes {
        0..10_240 => format!("{bytes} B"),
        10_240..10_485_760 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// A line for an engine that caches objects.
pub fn objects(one: &Watched) -> Option<String> {
    let requests = one.values.get("objects_requests")?;
    let [saved, count, disk_hits] =
        ["requests_saved", "count", "disk_hits"].map(|name| one.value(&format!("objects_{name}")));
    let received = size(one.value("objects_bytes_from_store"));
    let off = if one.value("objects_disk_is_off") > 0 { "; the disk is off" } else { "" };
    Some(format!(
        "{count} objects: {requests} requests, {saved} saved, {received} received, {disk_hits} pages from the disk{off}"
    ))
}

/// The requests to an endpoint: kind, class of the status, and number.
fn endpoint_requests(one: &Watched) -> impl Iterator<Item = (String, String, u64)> {
    one.values.iter().filter_map(|(name, value)| {
        let (kind, class) = name.strip_prefix("endpoint_")?.split_once('_')?;
        Some((escaped(kind), escaped(class), *value))
    })
}

/// A line for the server of a cache.
pub fn server(one: &Watched) -> Option<String> {
    let clients = one.values.get("serve_clients")?;
    let [requests, bypassed, failed, refused] = ["requests", "bypassed", "failed", "refused"]
        .map(|name| one.value(&format!("serve_{name}")));
    let mut line = format!(
        "{clients} clients: {requests} requests, {bypassed} left to the store, {failed} failed, {refused} refused"
    );
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for (kind, _, value) in endpoint_requests(one).filter(|(.., value)| *value > 0) {
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, sum)) => *sum = sum.saturating_add(value),
            None => kinds.push((kind, value)),
        }
    }
    let kinds: Vec<_> =
        kinds.iter().map(|(kind, sum)| format!("{sum} {}", printable(kind))).collect();
    if !kinds.is_empty() {
        let _ = write!(line, "; endpoint: {}", kinds.join(", "));
    }
    Some(line)
}

/// One snapshot of all engines.
pub fn plain(all: &[Watched]) -> String {
    let mut text = String::new();
    for one in all {
        let (hits, misses) = (one.value("hits"), one.value("misses"));
        let _ = writeln!(text, "{} {} {}", one.kind, one.pid, printable(&one.program));
        let rate = hit_rate(hits, misses);
        let _ = writeln!(text, "  hits {hits}, misses {misses}, hit rate {rate}");
        if one.kind == "run" {
            let (served, files) = (one.value("served_files"), one.value("files"));
            let adoptions = one.value("adoptions");
            let _ = writeln!(text, "  files {files}, served {served}, adoptions {adoptions}");
        } else {
            let [memory, limit, dirty, writing] =
                ["memory_bytes", "limit_bytes", "dirty_bytes", "writeback_bytes"]
                    .map(|name| size(one.value(name)));
            let _ = writeln!(
                text,
                "  memory {memory} of {limit}, dirty {dirty}, under write-back {writing}"
            );
            let (reads, writers) = (one.value("waiting_reads"), one.value("waiting_writers"));
            let _ = writeln!(text, "  waiting: {reads} reads, {writers} writers");
            for line in [objects(one), server(one)].into_iter().flatten() {
                let _ = writeln!(text, "  {line}");
            }
        }
        for (kind, latency) in one.latencies.iter().filter(|(_, latency)| latency.count > 0) {
            let [p50, p99, max] = [latency.p50_ns, latency.p99_ns, latency.max_ns].map(duration);
            let sample = match latency.one_in {
                1 => String::new(),
                one_in => format!(", one of {one_in}"),
            };
            let count = latency.count;
            let _ = writeln!(
                text,
                "  {} {count} timed{sample}: p50 {p50}, p99 {p99}, max {max}",
                printable(kind)
            );
        }
        for file in one.files.iter().take(10) {
            let (hits, misses) = (file.hits, file.misses);
            let state = if file.is_served { "served" } else { "kernel" };
            let _ = writeln!(
                text,
                "  {state} {hits} hits, {misses} misses [{}] {}",
                file.pid,
                printable(&file.path)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_and_its_endpoint_are_shown() {
        let values = [
            ("serve_clients", 2),
            ("serve_requests", 30),
            ("endpoint_get_2xx", 7),
            ("endpoint_get_4xx", 1),
            ("endpoint_put_2xx", 0),
        ];
        let watched = Watched {
            kind: "engine",
            pid: 5,
            program: "/bin/millpond serve".into(),
            id: 6,
            values: values.map(|(name, value)| (name.to_owned(), value)).into(),
            latencies: Default::default(),
            files: Vec::new(),
        };
        let line = server(&watched).unwrap();
        let expected =
            "2 clients: 30 requests, 0 left to the store, 0 failed, 0 refused; endpoint: 8 get";
        assert_eq!(line, expected);
        let text = prometheus(&[watched]);
        let of = "kind=\"engine\",pid=\"5\",engine=\"6\",program=\"millpond\"";
        for line in [
            format!("millpond_serve_clients{{{of}}} 2"),
            format!("millpond_endpoint_requests_total{{{of},request=\"get\",status=\"4xx\"}} 1"),
        ] {
            assert!(text.contains(&line), "{line}: {text}");
        }
    }
}
