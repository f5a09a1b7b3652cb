//! A client's part of one server: the mappings, the known objects, and the link (client.CL1).

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use millpond::internals::shared::{SharedClient, SharedReader, process_number};
use millpond_objects::serving::{BootTime, Validity};
use object_store::path::Path;
use thread_local::ThreadLocal;

use crate::client::link::Link;
use crate::client::objects::{KnownObject, KnownObjects};
use crate::protocol::Welcome;

/// Pages of one attempt, so that an unaligned range is not longer than the engine's 64.
const ATTEMPT_PAGES: u64 = 32;

/// The server's clock. A late estimate only makes versions older than they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerClock {
    pub(crate) now_ms: u64,
    /// Before the server looked at its clock.
    pub(crate) asked: BootTime,
}

impl ServerClock {
    fn now_ms(&self) -> u64 {
        // One more, as both parts are rounded down.
        let elapsed_ms = u64::try_from(self.asked.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.now_ms.saturating_add(elapsed_ms).saturating_add(1)
    }
}

pub(crate) struct Attachment {
    client: SharedClient,
    /// Each thread's; `None`: there are no more slots.
    readers: ThreadLocal<Option<SharedReader>>,
    /// For the threads without one.
    spare: Mutex<SharedReader>,
    validity: Validity,
    clock: ServerClock,
    max_age_ms: Option<u64>,
    page_bytes: u64,
    pub(crate) objects: KnownObjects,
    pub(crate) link: Arc<Link>,
    process: u64,
}

impl Attachment {
    /// `None`: a child of fork has called it.
    pub(crate) fn new(
        client: SharedClient,
        validity: Validity,
        (welcome, clock): (&Welcome, ServerClock),
        link: Arc<Link>,
        objects: KnownObjects,
    ) -> Option<Attachment> {
        for (name, head) in &welcome.known {
            if let (Ok(location), Some(place)) = (Path::parse(name), head.place) {
                let (meta, attributes) = (head.meta(location), head.attributes.clone());
                objects.insert(Arc::new(KnownObject::new(meta, attributes, place)));
            }
        }
        Some(Attachment {
            spare: Mutex::new(client.reader()?),
            client,
            readers: ThreadLocal::new(),
            validity,
            clock,
            max_age_ms: welcome.max_age_ms,
            page_bytes: welcome.page_bytes,
            objects,
            link,
            process: process_number(),
        })
    }

    /// Makes later hits cheaper. Takes some milliseconds.
    pub(crate) fn save_fences(&self) {
        self.client.save_fences();
    }

    /// Whether this process has attached, and not an ancestor of it.
    pub(crate) fn is_own(&self) -> bool {
        self.process == process_number()
    }

    /// Whether a version may be served without asking (client.CL3).
    #[inline]
    pub(crate) fn is_fresh(&self, object: &KnownObject) -> bool {
        let place = &object.place;
        let Some(validated_ms) = self.validity.validated_ms(place.slot, place.number) else {
            return false;
        };
        match self.max_age_ms {
            None => true,
            Some(0) => false,
            Some(age_ms) => self.clock.now_ms().saturating_sub(validated_ms) < age_ms,
        }
    }

    /// Copies cached bytes of an object, from byte `start` on. `None`: they are not cached, or there is no memory for a
    /// copy.
    #[inline]
    pub(crate) fn copy(&self, object: &KnownObject, start: u64, len: u64) -> Option<Bytes> {
        let len = usize::try_from(len).ok()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        let room = &mut bytes.spare_capacity_mut()[..len];
        if !self.copy_into(object, start, room) {
            return None;
        }
        // SAFETY: the room of `len` bytes was written.
        unsafe { bytes.set_len(len) };
        Some(bytes.into())
    }

    /// The same, to memory of the caller, whose content is not specified if this returns false.
    #[inline]
    pub(crate) fn copy_into(
        &self,
        object: &KnownObject,
        start: u64,
        dst: &mut [MaybeUninit<u8>],
    ) -> bool {
        match self.readers.get_or(|| self.client.reader()) {
            Some(reader) => self.copy_with(reader, object, start, dst),
            // A thread of the parent may have the lock (client.CL2).
            None if !self.is_own() => false,
            None => {
                let spare = self.spare.lock().expect("no panic under the lock");
                self.copy_with(&spare, object, start, dst)
            }
        }
    }

    #[inline]
    fn copy_with(
        &self,
        reader: &SharedReader,
        object: &KnownObject,
        start: u64,
        dst: &mut [MaybeUninit<u8>],
    ) -> bool {
        let mut from = object.place.base.saturating_add(start);
        for part in dst.chunks_mut((ATTEMPT_PAGES * self.page_bytes) as usize) {
            if reader.try_read_into(object.place.file, part, from) != Some(part.len()) {
                return false;
            }
            from = from.saturating_add(part.len() as u64);
        }
        true
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.link.close();
    }
}

#[cfg(test)]
mod tests {
    use millpond::internals::shared::SharedFile;
    use millpond_objects::serving::ObjectPlace;
    use millpond_objects::{CachedStore, Freshness};
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{Attributes, ObjectMeta, ObjectStore};

    use super::*;
    use crate::client::client_parts::ClientParts;
    use crate::{MemoryChoice, Server};

    /// Goal: a child of fork does not wait for a lock that a thread of its parent has.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_child_of_fork_does_not_wait_for_the_spare_reader() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let cache = CachedStore::builder(Arc::clone(&store)).memory_bytes(16 << 20);
        let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small);
        let server = tokio::spawn(Server::bind(cache.build().unwrap(), &socket).unwrap().run());
        let parts = Arc::new(ClientParts::new(store, socket, 16));
        let attachment = parts.attached().await.unwrap();
        let (location, last_modified) = (Path::from("pond"), chrono::DateTime::UNIX_EPOCH);
        let meta = ObjectMeta { location, last_modified, size: 1, e_tag: None, version: None };
        let file = SharedFile::from_words([0, 0]);
        let place = ObjectPlace { file, base: 0, slot: 0, number: 0 };
        let object = KnownObject::new(meta, Attributes::new(), place);
        let locked = attachment.spare.lock().unwrap();
        // SAFETY: the child takes memory at most, which glibc allows, and ends.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(10);
                libc::_exit(i32::from(attachment.copy(&object, 0, 1).is_some()));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert_eq!(status, 0, "the child has ended by itself");
        drop(locked);
        server.abort();
    }
}
