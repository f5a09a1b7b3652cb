//! Writes of objects, with a notice to the server before and after each.
//!
//! - **WR1** A write that has returned has removed its objects from the server's cache. The future of a write that was dropped has
//!   sent the message that does so, and its client does not find the object before.
//! - **WR2** If no server answers at the start, the objects are removed at the end, from the cache of a server that answers
//!   then. If the server dies between, its cache is gone as well. A server may be there and not answer: then the client keeps
//!   the objects' names, and sends them before it attaches.

use std::sync::Arc;

use object_store::path::Path;

use crate::client::attachment::Attachment;
use crate::client::client_parts::ClientParts;
use crate::client::link::Answer;
use crate::protocol::Request;

/// A write of one object. Dropped before [`WriteNotice::end`], it sends the end without waiting for the answer.
pub(crate) struct WriteNotice {
    parts: Arc<ClientParts>,
    location: Path,
    /// The server that knows of it, and the number of the write there.
    begun: Option<(Arc<Attachment>, u64)>,
    is_ended: bool,
}

impl WriteNotice {
    pub(crate) async fn begin(parts: &Arc<ClientParts>, location: &Path) -> WriteNotice {
        let mut notice = WriteNotice {
            parts: Arc::clone(parts),
            location: location.clone(),
            begun: None,
            is_ended: false,
        };
        if let Some(attachment) = parts.attached().await {
            attachment.objects.remove(location);
            let request = Request::BeginWrite { location: location.to_string() };
            if let Some((number, answer)) = attachment.link.start(&request, 0) {
                // From here on a drop ends the write.
                notice.begun = Some((attachment, number));
                if !matches!(answer.await, Ok(Answer::Done(_))) {
                    notice.begun = None;
                }
            }
        }
        notice
    }

    /// The write has ended, in whichever way.
    pub(crate) async fn end(mut self) {
        self.is_ended = true;
        if let Some((attachment, number)) = self.begun.take() {
            attachment.objects.remove(&self.location);
            let request = Request::EndWrite { begun: number };
            if let Some((_, answer)) = attachment.link.start(&request, 0)
                && answer.await.is_ok()
            {
                return;
            }
        }
        // WR2.
        forget(&self.parts, &self.location).await;
    }
}

impl Drop for WriteNotice {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        match &self.begun {
            Some((attachment, number)) if attachment.is_own() => {
                attachment.objects.remove(&self.location);
                _ = attachment.link.start(&Request::EndWrite { begun: *number }, 0);
            }
            _ => forget_soon(&self.parts, &self.location),
        }
    }
}

/// Messages to a server that closes each connection.
const FORGETS_MAX: u32 = 3;

/// Removes an object from the server's cache, now or before the client attaches again (WR2).
pub(crate) async fn forget(parts: &Arc<ClientParts>, location: &Path) {
    let request = Request::Forget { location: location.to_string() };
    if request.encode(0).is_none() {
        // No server has it: a read of it would be too long for a message as well.
        return;
    }
    for _ in 0..FORGETS_MAX {
        let Some(attachment) = parts.attached_for_write().await else {
            match parts.keep_forget(location) {
                true => return,
                false => continue,
            }
        };
        attachment.objects.remove(location);
        if let Some((_, answer)) = attachment.link.start(&request, 0)
            && answer.await.is_ok()
        {
            return;
        }
    }
    parts.gate().state().kept.add(location);
}

/// The same, without waiting.
pub(crate) fn forget_soon(parts: &Arc<ClientParts>, location: &Path) {
    let request = Request::Forget { location: location.to_string() };
    if request.encode(0).is_none() {
        return;
    }
    for _ in 0..FORGETS_MAX {
        if let Some(attachment) = parts.attachment() {
            attachment.objects.remove(location);
            if attachment.link.start(&request, 0).is_some() {
                return;
            }
        }
        parts.attach_soon();
        if parts.keep_forget(location) {
            return;
        }
    }
    parts.gate().state().kept.add(location);
}

#[cfg(test)]
mod tests {
    use millpond_objects::{CachedStore, Freshness};
    use object_store::memory::InMemory;
    use object_store::{ObjectStore, ObjectStoreExt};

    use super::*;
    use crate::{MemoryChoice, Server, SharedStore};

    /// Goal: a server forgets an object although a client has lost its connection to it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_object_is_forgotten_by_another_connection() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let cache = CachedStore::builder(Arc::clone(&store)).memory_bytes(16 << 20);
        let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small);
        let server = tokio::spawn(Server::bind(cache.build().unwrap(), &socket).unwrap().run());
        let reader = SharedStore::new(Arc::clone(&store), &socket);
        let parts = Arc::new(ClientParts::new(Arc::clone(&store), socket, 16));
        let path = Path::from("pond");
        for version in 10..40u32 {
            store.put(&path, version.to_string().into()).await.unwrap();
            parts.attached().await.unwrap().link.close();
            forget(&parts, &path).await;
            let read = reader.get_range(&path, 0..2).await.unwrap();
            assert_eq!(read, version.to_string());
        }
        server.abort();
    }

    /// Goal: a client that has kept more names than it may has all objects removed before it reads by a server.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn all_objects_are_forgotten_after_many_writes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let cache = CachedStore::builder(Arc::clone(&store)).memory_bytes(16 << 20);
        let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small);
        let server = tokio::spawn(Server::bind(cache.build().unwrap(), &socket).unwrap().run());
        let reader = SharedStore::new(Arc::clone(&store), &socket);
        let parts = Arc::new(ClientParts::new(Arc::clone(&store), socket, 16));
        let paths: Vec<_> = (0..300).map(|number| Path::from(format!("pond/{number}"))).collect();
        for path in &paths {
            store.put(path, "one".into()).await.unwrap();
            assert_eq!(reader.get_range(path, 0..3).await.unwrap(), "one");
            store.put(path, "two".into()).await.unwrap();
            assert!(parts.keep_forget(path));
        }
        parts.attached().await.unwrap();
        assert!(parts.gate().state().kept.is_empty());
        for path in &paths {
            assert_eq!(reader.get_range(path, 0..3).await.unwrap(), "two");
        }
        server.abort();
    }
}
