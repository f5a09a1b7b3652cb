//! The caches of a store: that of a server, and that of this process.
//!
//! ```text
//!   PrefixStore (if the URL has a prefix) -> SharedStore (if a server may run) -> ProcessStore -> the store of the URL
//! ```

use std::mem::MaybeUninit;
use std::sync::Arc;

use millpond_serve::SharedStore;
use object_store::ObjectStore;
use object_store::path::Path;
use object_store::prefix::PrefixStore;

use crate::process;
use crate::store::place;
use crate::store::process_store::ProcessStore;
use crate::store::server_watch::ServerWatch;
use crate::store::settings::StoreSettings;

/// The caches, and the store above them, whose names are below the prefix of the URL. They work in a child of fork as well.
#[derive(Clone)]
pub(crate) struct Caches {
    pub(crate) own: Arc<ProcessStore>,
    pub(crate) server: Option<Arc<ServerWatch>>,
    /// With the names of the whole store, for an endpoint.
    #[cfg(feature = "endpoint")]
    pub(crate) whole: Arc<dyn ObjectStore>,
    pub(crate) store: Arc<dyn ObjectStore>,
    prefix: Path,
}

impl Caches {
    /// May wait for a disk, and runs detached from the interpreter.
    pub(crate) fn open(settings: &Arc<StoreSettings>) -> place::Result<Caches> {
        process::watch_forks();
        let own = Arc::new(ProcessStore::open(settings)?);
        let server = settings.socket.path().map(|(socket, is_expected)| {
            let below = Arc::clone(&own) as Arc<dyn ObjectStore>;
            let mut client = SharedStore::new(below, &socket);
            if let Some(freshness) = settings.freshness {
                client = client.require_freshness(freshness);
            }
            Arc::new(ServerWatch::new(client, &settings.url, &socket, is_expected))
        });
        let whole: Arc<dyn ObjectStore> = match &server {
            Some(server) => Arc::new(server.client.clone()),
            None => Arc::clone(&own) as Arc<dyn ObjectStore>,
        };
        // Above the caches, as the disk tier and a server know a store by its name, which a prefix would hide.
        let prefix = own.prefix().clone();
        let store = if prefix.as_ref().is_empty() {
            Arc::clone(&whole)
        } else {
            Arc::new(PrefixStore::new(Arc::clone(&whole), prefix.clone()))
        };
        Ok(Caches {
            own,
            server,
            #[cfg(feature = "endpoint")]
            whole,
            store,
            prefix,
        })
    }

    pub(crate) fn full_name(&self, path: &Path) -> Path {
        if self.prefix.as_ref().is_empty() {
            return path.clone();
        }
        self.prefix.parts().chain(path.parts()).collect()
    }

    /// The length of an object that is cached and fresh: by the server if it is attached, else in this process.
    pub(crate) fn cached_size(&self, name: &Path) -> Option<u64> {
        match &self.server {
            Some(server) if server.client.is_attached() => server.client.cached_size(name),
            // A read by the client looks for a server.
            Some(server) if server.client.is_attach_due() => None,
            _ => self.own.cached_size(name),
        }
    }

    /// Copies cached and fresh ranges of one version. Returns the object's length. The read may be by another cache than the
    /// look at the length, so the caller compares the two.
    pub(crate) fn try_read_into(
        &self,
        name: &Path,
        ranges: &mut [(u64, &mut [MaybeUninit<u8>])],
    ) -> Option<u64> {
        match &self.server {
            Some(server) if server.client.is_attached() => {
                server.client.try_read_ranges_into(name, ranges)
            }
            _ => self.own.try_read_into(name, ranges),
        }
    }
}
