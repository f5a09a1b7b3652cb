//! Millpond: the server's memory by the engine's interface and by `SharedStore`, and the cache in the process.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond::internals::shared::{ClientMemory, SharedClient, SharedReader};
use millpond_objects::serving::{ObjectPlace, Validity};
use millpond_objects::{CachedStore, Freshness};
use millpond_serve::SharedStore;
use millpond_serve::protocol::{
    Greeting, Hello, PROTOCOL_VERSION, REPLY_BYTES_MAX, ReadMessage, Reply, Request,
};
use object_store::{GetOptions, GetRange, ObjectStore};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use tokio::runtime::Runtime;

use super::{OBJECT, Peer, check, first_word, timed};
use crate::process::Done;
use crate::synthetic_store::{SyntheticStore, path};
use crate::warm::OBJECT_BYTES;

/// The longest part of one attempt: 32 pages.
const ATTEMPT_BYTES: usize = 512 << 10;

/// As `millpond serve` builds it.
pub fn cache(store: Arc<dyn ObjectStore>, memory_bytes: u64) -> millpond_objects::Builder {
    CachedStore::builder(store).memory_bytes(memory_bytes).freshness(Freshness::Immutable)
}

/// Reads of a client's mapping, with the check that the version is current: the parts of a hit of `SharedStore`
/// without its look-up by name, and into memory that the caller reuses.
pub struct EngineInterface {
    _socket: OwnedFd,
    _client: SharedClient,
    reader: SharedReader,
    validity: Validity,
    place: ObjectPlace,
    server: u32,
    buffer: Vec<u8>,
}

impl EngineInterface {
    pub fn attach(socket_path: &FilePath, server: u32) -> Done<EngineInterface> {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(socket_path)?)?;
        let memory = ClientMemory::create()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [memory.descriptor().as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let hello = Hello { version: PROTOCOL_VERSION, store_name: Some("synthetic".into()) };
        let hello = hello.encode().ok_or("a long name")?;
        rustix::net::sendmsg(&socket, &[IoSlice::new(&hello)], &mut control, SendFlags::NOSIGNAL)?;
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let greeting = Greeting::decode(&buffer[..received.bytes]);
        let Ok(Greeting::Welcome(_)) = greeting else {
            return Err(format!("no welcome, but {greeting:?}").into());
        };
        let rights = control.drain().filter_map(|one| match one {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let [cache, validity] = <[OwnedFd; 2]>::try_from(rights.flatten().collect::<Vec<_>>())
            .map_err(|_| "a greeting without two descriptors")?;
        let client = SharedClient::map(memory, &cache)?;
        client.save_fences();
        let read = ReadMessage {
            location: path(OBJECT).to_string(),
            ranges: vec![Some(GetRange::Bounded(0..4096))],
            ..ReadMessage::default()
        };
        let request = Request::Read(read).encode(1).ok_or("too long")?;
        rustix::net::send(&socket, &request, SendFlags::NOSIGNAL)?;
        let (_, len) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let place = match Reply::decode(&buffer[..len]) {
            Ok((_, Reply::Object(head, _))) => head.place.ok_or("the object is not cached")?,
            other => return Err(format!("no object, but {other:?}").into()),
        };
        Ok(EngineInterface {
            reader: client.reader().ok_or("no slot")?,
            validity: Validity::map(validity.as_fd())?,
            _socket: socket,
            _client: client,
            place,
            server,
            buffer: vec![0; 1 << 20],
        })
    }
}

impl Peer for EngineInterface {
    fn name(&self) -> String {
        "millpond serve, engine's interface".into()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let Self { reader, validity, place, buffer, .. } = self;
        timed(places, times, |at| {
            validity.validated_ms(place.slot, place.number).ok_or("another version")?;
            for (part, from) in buffer[..len]
                .chunks_mut(ATTEMPT_BYTES)
                .zip((place.base + at..).step_by(ATTEMPT_BYTES))
            {
                if reader.try_read(place.file, part, from) != Some(part.len()) {
                    return Err("a miss".into());
                }
            }
            Ok(first_word(buffer))
        })
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.server]
    }
}

/// An object store, read through its interface by a task.
pub struct Store {
    name: &'static str,
    store: Arc<dyn ObjectStore>,
    runtime: Runtime,
    processes: Vec<u32>,
}

impl Store {
    fn new(name: &'static str, store: Arc<dyn ObjectStore>, processes: Vec<u32>) -> Done<Store> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build()?;
        let mut own = Store { name, store, runtime, processes };
        // Brings the object into the cache, and into the mapping.
        let places: Vec<u64> = (0..OBJECT_BYTES).step_by(1 << 20).collect();
        own.read_all(&places, 1 << 20, &mut Vec::new())?;
        Ok(own)
    }

    pub fn shared(socket: &FilePath, server: u32, object_bytes: u64) -> Done<Store> {
        let remote = Arc::new(SyntheticStore::new(object_bytes, Duration::from_millis(3)));
        let store = Arc::new(SharedStore::new(remote, socket));
        let own =
            Store::new("millpond serve, `SharedStore`", Arc::clone(&store) as _, vec![server])?;
        if store.stats().fallbacks > 0 {
            return Err("the server did not answer".into());
        }
        Ok(own)
    }

    pub fn private(object_bytes: u64, memory_bytes: u64) -> Done<Store> {
        let remote = Arc::new(SyntheticStore::new(object_bytes, Duration::from_millis(3)));
        Store::new(
            "millpond, `CachedStore` in the process",
            Arc::new(cache(remote, memory_bytes).build()?),
            vec![],
        )
    }
}

impl Peer for Store {
    fn name(&self) -> String {
        self.name.into()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let (store, path, places) = (Arc::clone(&self.store), path(OBJECT), places.to_vec());
        let reading = self.runtime.spawn(async move {
            let mut times = Vec::with_capacity(places.len());
            for at in places {
                let started = Instant::now();
                let range = Some(GetRange::Bounded(at..at + len as u64));
                let options = GetOptions::new().with_range(range);
                let read =
                    store.get_opts(&path, options).await.map_err(|error| error.to_string())?;
                let bytes = read.bytes().await.map_err(|error| error.to_string())?;
                if bytes.len() != len {
                    return Err("a short read".into());
                }
                let found = first_word(&bytes);
                drop(bytes);
                times.push(started.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
                check(at, found).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(times)
        });
        times.extend(self.runtime.block_on(reading)??);
        Ok(())
    }

    fn processes(&self) -> Vec<u32> {
        self.processes.clone()
    }
}
