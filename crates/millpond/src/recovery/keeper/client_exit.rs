//! Recovery of dead clients: finds dead processes, and starts a thread for each.

use std::io;
use std::sync::mpsc::channel;

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::retry_on_intr;

use crate::recovery::keeper::clients::{Client, Connection, Keeper, Message};
use crate::recovery::keeper::replay::{Dead, replay};
use crate::recovery::keeper::report::{FileReport, Report};
use crate::recovery::keeper::target::Adopted;
use crate::thread::spawn as spawn_thread;

impl Keeper {
    /// Starts the recovery of all clients whose process is dead.
    pub(super) fn bury_dead(&mut self, on_report: &mut impl FnMut(Report)) -> io::Result<()> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let processes = self.clients.iter().map(|client| &client.process);
        let mut polled: Vec<_> = processes.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout)))?;
        let is_dead = polled.iter().map(|fd| !fd.revents().is_empty());
        let dead: Vec<u64> =
            self.clients.iter().zip(is_dead).filter(|(_, dead)| *dead).map(|(c, _)| c.id).collect();
        for id in dead {
            self.recover_client(id, None, on_report);
        }
        Ok(())
    }

    /// Writes back a process's dirty pages, and forgets the process: on a separate thread, so that neither
    /// the keeper nor other recoveries wait for it. `goodbye`: the process lives, and waits.
    pub(super) fn recover_client(
        &mut self,
        id: u64,
        goodbye: Option<Connection>,
        on_report: &mut impl FnMut(Report),
    ) {
        let Some(at) = self.clients.iter().position(|client| client.id == id) else { return };
        let Client { pid, memory, mut files, .. } = self.clients.swap_remove(at);
        for file in &mut files {
            // Now, and not when their write-back starts.
            file.note();
            if let Some(mark) = &file.mark {
                let _ = epoll::delete(&self.marks, &mark.listener);
                mark.begin_recovery();
            }
        }
        let dead = Dead { pid, memory, patience: self.patience };
        let is_goodbye = goodbye.is_some();
        let teller = self.teller();
        let (give, take) = channel::<(Dead, Vec<Adopted>, Option<Connection>)>();
        let thread = move || {
            let Ok((dead, files, goodbye)) = take.recv() else { return };
            let lost: Vec<_> = files.iter().map(|file| (file.device, file.inode)).collect();
            let replayed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut kept = None;
                replay(dead, files, |files| {
                    let report = Report { pid, goodbye: is_goodbye, files };
                    if let Some(report) = kept.replace(report) {
                        teller.notify(Message::Buried { report, is_last: false, goodbye: None });
                    }
                });
                kept.expect("reported at least once")
            }));
            let report = replayed.unwrap_or_else(|_| Report {
                pid,
                goodbye: is_goodbye,
                files: lost.into_iter().map(FileReport::of_panic).collect(),
            });
            teller.notify(Message::Buried { report, is_last: true, goodbye });
        };
        self.under_way += 1;
        match spawn_thread("millpond-bury", thread) {
            Ok(()) => drop(give.send((dead, files, goodbye))),
            Err(_) => {
                self.under_way -= 1;
                replay(dead, files, |files| {
                    if !is_goodbye || !files.is_empty() {
                        on_report(Report { pid, goodbye: is_goodbye, files });
                    }
                });
                if let Some(connection) = goodbye {
                    connection.answer(Ok(0));
                }
            }
        }
    }
}
