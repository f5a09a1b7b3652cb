//! Counts of the server and of its endpoint, which are published with the statistics of the cache.

use std::fmt::Write as _;
use std::sync::OnceLock;

use millpond_serve::ServerCounts;

use super::running_endpoint::{EndpointCounts, RunningEndpoint};

/// Counts that are published as soon as the server runs. They do not keep the cache alive, whose thread publishes them.
#[derive(Default)]
pub struct PublishedCounts(OnceLock<(ServerCounts, Option<EndpointCounts>)>);

impl PublishedCounts {
    pub fn publish(&self, server: ServerCounts, endpoint: Option<&RunningEndpoint>) {
        // It is called once.
        _ = self.0.set((server, endpoint.map(RunningEndpoint::counts)));
    }

    /// A line with name and number for each count. `millpond top` knows the names.
    pub fn lines(&self) -> String {
        let mut text = String::new();
        let Some((server, endpoint)) = self.0.get() else { return text };
        for (name, count) in [
            ("clients", server.clients()),
            ("attached", server.attached()),
            ("refused", server.refused()),
            ("requests", server.requests()),
            ("bypassed", server.bypassed()),
            ("failed", server.failed()),
        ] {
            let _ = writeln!(text, "serve_{name} {count}");
        }
        for (kind, class, count) in endpoint.iter().flat_map(EndpointCounts::all) {
            let _ = writeln!(text, "endpoint_{kind}_{class} {count}");
        }
        text
    }
}
