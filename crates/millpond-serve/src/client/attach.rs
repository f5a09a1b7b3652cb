//! Attaches a client to its server, and again when that is gone.
//!
//! A read that misses connects, at most every [`RETRY`], so no timer is needed. The end of a write connects at any time, as a
//! server that serves others has to remove the object. A thread exchanges the greetings, as the server may be slow;
//! others wait for its end.
//!
//! Locks: the gate, a leaf lock.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::Guard;
use millpond::internals::shared::{ClientMemory, SharedClient};
use millpond_objects::serving::{BootTime, Validity};
use object_store::path::Path;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::sync::watch;

use crate::client::attachment::{Attachment, ServerClock};
use crate::client::client_parts::ClientParts;
use crate::client::gate::{Gate, GateState};
use crate::client::link::Link;
use crate::client::objects::KnownObjects;
use crate::client::stats::ClientCounters;
use crate::protocol::{
    Greeting, Hello, PROTOCOL_VERSION, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Welcome,
};
use crate::socket;

/// Time between attempts to connect.
pub(crate) const RETRY: Duration = Duration::from_millis(500);
/// The same, after a server that has refused the client, or did not greet it.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// For so long a server may take to greet. Chosen.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// The same, for writes, until [`RETRY_REFUSED`] after a server that did not greet. Chosen.
const GREETING_TIMEOUT_AGAIN: Duration = Duration::from_millis(100);

/// An attempt to attach.
struct Attempt {
    /// Its sender is dropped at the end, and never sends.
    end: watch::Receiver<()>,
    /// The caller has started it.
    is_own: bool,
}

impl Attempt {
    async fn ended(mut self) {
        _ = self.end.changed().await;
    }
}

impl ClientParts {
    /// The attachment of this process, whose server was there a moment ago.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        let attachment = self.current.load_full()?;
        if !attachment.is_own() {
            // CL2: a parent's, which is leaked. Another thread may have attached.
            let found = self.current.compare_and_swap(&attachment, None);
            std::mem::forget(attachment);
            return match Guard::into_inner(found) {
                Some(own) if own.is_own() => (!own.link.is_gone()).then_some(own),
                parents => {
                    std::mem::forget(parents);
                    None
                }
            };
        }
        (!attachment.link.is_gone()).then_some(attachment)
    }

    pub(crate) fn gate(&self) -> Arc<Gate> {
        let gate = self.gate.load_full();
        if gate.is_own() {
            return gate;
        }
        // CL2: a thread of the parent may have the lock.
        std::mem::forget((self.gate.swap(Arc::new(Gate::new())), gate));
        self.gate.load_full()
    }

    /// The attachment, after an attempt to attach if there is none. `None`: no server answers.
    pub(crate) async fn attached(self: &Arc<Self>) -> Option<Arc<Attachment>> {
        if let Some(attachment) = self.attachment() {
            return Some(attachment);
        }
        self.start_attempt(false)?.ended().await;
        self.attachment()
    }

    /// The same for the end of a write, with an attempt even if another one has failed a moment ago.
    pub(crate) async fn attached_for_write(self: &Arc<Self>) -> Option<Arc<Attachment>> {
        // An attempt of another caller may be at a server that was replaced since.
        for _ in 0..2 {
            if let Some(attachment) = self.attachment() {
                return Some(attachment);
            }
            let attempt = self.start_attempt(true)?;
            let is_own = attempt.is_own;
            attempt.ended().await;
            if is_own {
                break;
            }
        }
        self.attachment()
    }

    /// Starts to attach, without waiting.
    pub(crate) fn attach_soon(self: &Arc<Self>) {
        self.start_attempt(true);
    }

    /// Keeps an object for the next server, unless one is attached now (false). If no server listens, there is nothing to keep.
    pub(crate) fn keep_forget(&self, location: &Path) -> bool {
        let gate = self.gate();
        let mut state = gate.state();
        // Under the lock, as in `publish`.
        if self.attachment().is_some() {
            return false;
        }
        if state.under_way.is_some() || !state.has_no_server() {
            state.kept.add(location);
        }
        true
    }

    /// Publishes the attachment for later reads, after its server has removed the objects that were written before.
    fn publish(&self, gate: &Gate, attached: Arc<Attachment>) -> io::Result<()> {
        loop {
            let kept = {
                let mut state = gate.state();
                if state.kept.is_empty() {
                    self.current.store(Some(attached));
                    *state = GateState::default();
                    return Ok(());
                }
                std::mem::take(&mut state.kept)
            };
            if let Err(error) = attached.link.ask_at_first(&kept.requests()) {
                gate.state().kept.add_all(&kept);
                return Err(error);
            }
        }
    }

    /// `None`: no server listens, or an attempt has failed a moment ago. `at_once`: for the end of a write.
    fn start_attempt(self: &Arc<Self>, at_once: bool) -> Option<Attempt> {
        let gate = self.gate();
        let connected = {
            let mut state = gate.state();
            if let Some(under_way) = &state.under_way {
                return Some(Attempt { end: under_way.clone(), is_own: false });
            }
            let is_before = |at: Option<Instant>| at.is_some_and(|at| Instant::now() < at);
            let is_early = is_before(state.retry_at);
            let must_wait = if at_once { is_before(state.write_retry_at) } else { is_early };
            if must_wait {
                return None;
            }
            // The previous attempt has just succeeded, maybe.
            if self.attachment().is_some() {
                return Some(Attempt { end: watch::channel(()).1, is_own: false });
            }
            let is_again = is_early && state.is_silent();
            let timeout = if is_again { GREETING_TIMEOUT_AGAIN } else { GREETING_TIMEOUT };
            let (ends, end) = watch::channel(());
            let (weak, gate) = (Arc::downgrade(self), Arc::clone(&gate));
            let started = socket::connect_to_own(&self.socket).and_then(|socket| {
                let thread = std::thread::Builder::new().name("millpond-client".into());
                thread.spawn(move || run_link(&weak, &gate, (socket, timeout), ends))
            });
            if started.is_ok() {
                state.under_way = Some(end.clone());
            }
            started.map(|_| end)
        };
        match connected {
            Ok(end) => Some(Attempt { end, is_own: true }),
            Err(error) => {
                gate.fail(&self.socket, &error, RETRY);
                None
            }
        }
    }
}

/// The client's thread: attaches, and receives until the server is gone.
fn run_link(
    parts: &Weak<ClientParts>,
    gate: &Gate,
    (socket, timeout): (OwnedFd, Duration),
    ends: watch::Sender<()>,
) {
    let (link, attachment) = {
        let Some(parts) = parts.upgrade() else { return };
        let attached = attach(&parts, socket, timeout).and_then(|attached| {
            let (link, attached) = (Arc::clone(&attached.link), Arc::new(attached));
            let attachment = Arc::downgrade(&attached);
            parts.publish(gate, attached).map(|()| (link, attachment))
        });
        match attached {
            Ok(attached) => {
                ClientCounters::add(&parts.counters.attaches);
                drop(ends);
                attached
            }
            Err(error) => return gate.fail(&parts.socket, &error, RETRY_REFUSED),
        }
    };
    // Not while the program starts, or may end soon: it would wait for this.
    let error = link.watch(|| {
        if let Some(attachment) = attachment.upgrade() {
            attachment.save_fences();
        }
    });
    let Some(parts) = parts.upgrade() else { return };
    tracing::warn!(
        socket = %parts.socket.display(), %error, "the cache server is gone: reads go to the store itself"
    );
    // CL1. Another attachment is not there before this thread has removed this one, or a read has seen that it is gone.
    let current = parts.current.load_full();
    if current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.link, &link)) {
        parts.current.compare_and_swap(&current, None);
    }
}

/// The server validates as often as the program wants it.
fn check_freshness(wanted: Option<Duration>, server_ms: Option<u64>) -> Result<(), String> {
    let Some(wanted) = wanted else { return Ok(()) };
    let server = server_ms.map(Duration::from_millis);
    if server.is_some_and(|server| server <= wanted) {
        return Ok(());
    }
    let what = server.map_or("objects as immutable".into(), |age| format!("versions of {age:?}"));
    Err(format!("the server serves {what}, and this client wants no version older than {wanted:?}"))
}

fn attach(parts: &ClientParts, socket: OwnedFd, timeout: Duration) -> io::Result<Attachment> {
    socket::ensure_room(&socket, REQUEST_BYTES_MAX)?;
    let memory = ClientMemory::create()?;
    let asked = BootTime::now();
    let own_name = parts.store_name.clone();
    let hello = Hello { version: PROTOCOL_VERSION, store_name: Some(own_name.clone()) };
    let hello = hello.encode().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the name of the store is too long")
    })?;
    // A server that refuses the user closes the connection, maybe before this. Its reason can be received all the same.
    let sent = socket::send_with(&socket, &hello, &[memory.descriptor().as_fd()]);
    // While the server greets: the first map of a process reads files of its control group, which takes 0.1 ms.
    let objects = KnownObjects::new(parts.objects_max);
    let mut buffer = vec![0; REPLY_BYTES_MAX];
    let mut events = [PollFd::new(&socket, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).expect("a short time");
    if rustix::io::retry_on_intr(|| rustix::event::poll(&mut events, Some(&timeout)))? == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not greet"));
    }
    let mut received = socket::receive_with(&socket, &mut buffer);
    if received.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset) {
        // The server has not read the hello. The kernel reports that once, before the messages that are there.
        received = socket::receive_with(&socket, &mut buffer);
    }
    let (len, descriptors) = match (received, sent) {
        (Ok((len, descriptors)), _) if len > 0 => (len, descriptors),
        (_, Err(error)) | (Err(error), _) => return Err(error),
        (Ok(_), Ok(_)) => return Err(io::ErrorKind::UnexpectedEof.into()),
    };
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let greeting = Greeting::decode(&buffer[..len])
        .map_err(|error| invalid(format!("no greeting of a server: {error}")))?;
    let welcome: Welcome = match greeting {
        Greeting::Welcome(welcome) => welcome,
        Greeting::Refused(why) => return Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
    };
    if welcome.store_name != own_name {
        return Err(invalid(format!(
            "the server caches the store {}, and this client's is {own_name}",
            welcome.store_name
        )));
    }
    check_freshness(parts.max_age, welcome.max_age_ms).map_err(invalid)?;
    let page_bytes = welcome.page_bytes;
    if !page_bytes.is_power_of_two() || page_bytes > u64::from(millpond::PAGE_BYTES_MAX) {
        return Err(invalid(format!("the server has pages of {page_bytes} bytes")));
    }
    let [cache, validity] = <[OwnedFd; 2]>::try_from(descriptors)
        .map_err(|all| invalid(format!("a greeting with {} descriptors, not 2", all.len())))?;
    let client = SharedClient::map(memory, &cache)?;
    let validity = Validity::map(validity.as_fd())?;
    let clock = ServerClock { now_ms: welcome.now_ms, asked };
    let link = Arc::new(Link::new(socket)?);
    Attachment::new(client, validity, (&welcome, clock), link, objects)
        .ok_or_else(|| io::Error::other("the process has forked"))
}
