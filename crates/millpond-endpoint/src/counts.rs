//! Counts of an endpoint's requests, by kind and by the class of the response's status.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use http::{Method, StatusCode};

const KINDS: [&str; 6] = ["get", "head", "list", "put", "delete", "post"];
const CLASSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

/// Counts of requests, which may outlive the endpoint. Clones share them.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # let dir = tempfile::tempdir().unwrap();
/// # let builder = millpond_endpoint::Endpoint::builder();
/// # let builder = builder.store("data", Arc::new(object_store::memory::InMemory::new()));
/// # let builder = builder.listen("127.0.0.1:0".parse().unwrap());
/// # let endpoint = builder.key_file(dir.path().join("key/credentials")).build().unwrap();
/// let counts = endpoint.counts();
/// for (kind, class, count) in counts.all() {
///     println!("{kind} {class}: {count}");
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct RequestCounts(Arc<[[AtomicU64; CLASSES.len()]; KINDS.len()]>);

impl RequestCounts {
    /// All counts: the kind of the request, the class of its status, and the number. A list of objects or of buckets is a
    /// `list`, other requests are named by their method.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let row = |(kind, row): (&'static str, &[AtomicU64; CLASSES.len()])| {
            // Relaxed, here and below: a count publishes no other data.
            let row = row.each_ref().map(|count| count.load(Relaxed));
            CLASSES.into_iter().zip(row).map(move |(class, count)| (kind, class, count))
        };
        KINDS.into_iter().zip(self.0.iter()).flat_map(row)
    }

    pub(crate) fn add(&self, kind: usize, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(2, 5) - 2;
        self.0[kind][class].fetch_add(1, Relaxed);
    }
}

/// The number of the kind.
pub(crate) fn kind_of(method: &Method, path: &str) -> usize {
    let has_key =
        path.trim_start_matches('/').split_once('/').is_some_and(|(_, key)| !key.is_empty());
    let name = match *method {
        Method::GET if has_key => "get",
        Method::GET => "list",
        Method::HEAD => "head",
        Method::PUT => "put",
        Method::DELETE => "delete",
        _ => "post",
    };
    KINDS.iter().position(|kind| *kind == name).expect("a kind")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_kind_and_class() {
        let counts = RequestCounts::default();
        for (method, path, status) in [
            (Method::GET, "/b/k", 206),
            (Method::GET, "/b/k/l", 404),
            (Method::GET, "/b/", 200),
            (Method::GET, "/", 200),
            (Method::HEAD, "/b/k", 304),
            (Method::PUT, "/b/k", 100),
            (Method::POST, "/b?delete", 503),
        ] {
            counts.add(kind_of(&method, path), StatusCode::from_u16(status).unwrap());
        }
        let found: Vec<_> = counts.all().filter(|(_, _, count)| *count > 0).collect();
        let expected = [
            ("get", "2xx", 1),
            ("get", "4xx", 1),
            ("head", "3xx", 1),
            ("list", "2xx", 2),
            ("put", "2xx", 1),
            ("post", "5xx", 1),
        ];
        assert_eq!(found, expected);
    }
}
