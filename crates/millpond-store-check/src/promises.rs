//! Tests each promise of a store.

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, PutMode, UpdateVersion};

use crate::Options;
use crate::open::Endpoint;
use crate::race::{RaceOutcome, judge_race, race};
use crate::report::{Promise, Report, Verdict};
use crate::writes::{StoredObject, WriteOutcome, Writer, new_id, or};

type CheckResult = Result<(), String>;

/// Lost replies on each endpoint, for creates and for updates. They are all alike, so a few suffice.
const LOSSES: usize = 5;

/// Tests the promises of the store behind `endpoints`. It writes below a unique prefix, and removes its objects.
///
/// # Errors
///
/// A message, if plain writes and reads fail, so that no promise can be tested.
///
/// # Panics
///
/// If there is no endpoint, or no racer.
pub async fn check(endpoints: &[Endpoint], options: &Options) -> Result<Report, String> {
    assert!(!endpoints.is_empty() && options.racers > 0, "at least one endpoint and one racer");
    let dir = endpoints[0].prefix.clone().join(format!("millpond-store-check-{}", new_id()));
    let mut check = Check {
        endpoints,
        options,
        writer: Writer { metadata: true, timeout: options.request_timeout },
        dir: dir.clone(),
        notes: Vec::new(),
    };
    let promises = check.check_all().await;
    let mut notes = check.notes;
    if let Err(error) = remove(&*endpoints[0].store, &dir).await {
        notes.push(format!("{dir} could not be removed: {error}"));
    }
    let endpoints = endpoints.iter().map(|endpoint| endpoint.name.clone()).collect();
    Ok(Report { endpoints, promises: promises?, notes })
}

async fn remove(store: &dyn ObjectStore, dir: &Path) -> object_store::Result<()> {
    let left: Vec<_> = store.list(Some(dir)).try_collect().await?;
    for object in left {
        store.delete(&object.location).await?;
    }
    Ok(())
}

struct Check<'a> {
    endpoints: &'a [Endpoint],
    options: &'a Options,
    writer: Writer,
    dir: Path,
    notes: Vec<String>,
}

impl Check<'_> {
    async fn check_all(&mut self) -> Result<Vec<Promise>, String> {
        let metadata = self.metadata().await?;
        Ok(vec![
            metadata,
            self.read_after_write().await?,
            self.conditional_reads().await?,
            self.create_twice().await?,
            self.racing_creates().await?,
            self.stale_update().await?,
            self.racing_updates().await?,
            self.lost_replies().await?,
        ])
    }

    fn new_path(&self) -> Path {
        self.dir.clone().join(new_id())
    }

    /// Writes without a condition. All other tests need this to work.
    async fn overwrite(&self, store: &dyn ObjectStore, at: &Path, id: &str) -> Result<(), String> {
        match self.writer.put(store, at, id, PutMode::Overwrite).await {
            WriteOutcome::Done(_) => Ok(()),
            outcome => Err(format!("{at} can't be written: {outcome:?}")),
        }
    }

    async fn read_existing(
        &self,
        store: &dyn ObjectStore,
        at: &Path,
    ) -> Result<StoredObject, String> {
        let object = self.writer.read(store, at).await?;
        or(object, format_args!("{at} was written, but does not exist"))
    }

    async fn metadata(&mut self) -> Result<Promise, String> {
        let words = "metadata are returned with the object, so a retry can identify its own write";
        let mut promise = Promise::new("metadata", words);
        let (at, id) = (self.new_path(), new_id());
        let store = &*self.endpoints[0].store;
        let outcome = self.writer.put(store, &at, &id, PutMode::Overwrite).await;
        if let WriteOutcome::NotOffered(why) = outcome {
            self.writer.metadata = false;
            promise.set_unless_broken(Verdict::NotOffered, why);
            return Ok(promise);
        }
        self.overwrite(store, &at, &id).await?;
        for endpoint in self.endpoints {
            promise.tries += 1;
            let object = self.read_existing(&*endpoint.store, &at).await?;
            if object.id_by_metadata.as_deref() != Some(&id) {
                let had = object.id_by_metadata;
                promise.mark_broken(format!("{}: {id} was written, {had:?} read", endpoint.name));
            }
        }
        Ok(promise)
    }

    async fn read_after_write(&self) -> Result<Promise, String> {
        let words = "a written object is read at once, through every endpoint";
        let mut promise = Promise::new("read_after_write", words);
        let at = self.new_path();
        for _ in 0..self.options.rounds.min(10) {
            for writer in self.endpoints {
                let id = new_id();
                self.overwrite(&*writer.store, &at, &id).await?;
                for reader in self.endpoints {
                    promise.tries += 1;
                    let object = self.writer.read(&*reader.store, &at).await?;
                    if object.is_none_or(|object| object.id != id) {
                        let (from, to) = (&writer.name, &reader.name);
                        promise
                            .mark_broken(format!("written through {from}, not read through {to}"));
                    }
                }
            }
        }
        Ok(promise)
    }

    async fn conditional_reads(&self) -> Result<Promise, String> {
        let words = "a read obeys If-None-Match and If-Match";
        let mut promise = Promise::new("conditional_reads", words);
        for endpoint in self.endpoints {
            let (store, at) = (&*endpoint.store, self.new_path());
            self.overwrite(store, &at, &new_id()).await?;
            let first = self.read_existing(store, &at).await?.version.e_tag;
            self.overwrite(store, &at, &new_id()).await?;
            let second = self.read_existing(store, &at).await?.version.e_tag;
            if first.is_none() || first == second {
                promise.mark_broken(format!("{}: ETags {first:?}, then {second:?}", endpoint.name));
                continue;
            }
            let none_match =
                |tag: &Option<String>| GetOptions::new().with_if_none_match(tag.clone());
            let matching = |tag: &Option<String>| GetOptions::new().with_if_match(tag.clone());
            for (options, expected) in [
                (none_match(&second), "304"),
                (none_match(&first), "200"),
                (matching(&second), "200"),
                (matching(&first), "412"),
            ] {
                promise.tries += 1;
                let sent = format!("{:?}, {:?}", options.if_none_match, options.if_match);
                match self.writer.read_if(store, &at, options).await {
                    Ok(outcome) if outcome == expected => {}
                    Ok(outcome) => {
                        promise.mark_broken(format!("{sent}: {outcome}, not {expected}"))
                    }
                    Err(why) => promise.mark_undecided(why),
                }
            }
        }
        Ok(promise.finished())
    }

    async fn create_twice(&self) -> Result<Promise, String> {
        let words = "a create of an existing object is refused (If-None-Match: *)";
        let mut promise = Promise::new("create_twice", words);
        for first in self.endpoints {
            for second in self.endpoints {
                let (at, id) = (self.new_path(), new_id());
                promise.tries += 1;
                match self.writer.put(&*first.store, &at, &id, PutMode::Create).await {
                    WriteOutcome::Done(_) => {}
                    WriteOutcome::NotOffered(why) => {
                        promise.set_unless_broken(Verdict::NotOffered, why)
                    }
                    WriteOutcome::Refused => {
                        promise.mark_broken("refused, although there was no object".into())
                    }
                    WriteOutcome::Unknown(why) => {
                        promise.mark_undecided(why);
                        continue;
                    }
                }
                if promise.verdict == Verdict::NotOffered {
                    return Ok(promise);
                }
                let again = self.writer.put(&*second.store, &at, &new_id(), PutMode::Create).await;
                let names = format!("{}, then {}", first.name, second.name);
                if matches!(again, WriteOutcome::Done(_)) {
                    promise.mark_broken(format!("{names}: the second create succeeded, too"));
                } else if self.read_existing(&*second.store, &at).await?.id != id {
                    promise
                        .mark_broken(format!("{names}: the second create failed, but was stored"));
                }
            }
        }
        Ok(promise.finished())
    }

    async fn racing_creates(&self) -> Result<Promise, String> {
        let words = "of concurrent creates, one succeeds and is stored";
        let mut promise = Promise::new("racing_creates", words);
        for _ in 0..self.options.rounds {
            if self.run_round(&mut promise, &self.new_path(), &PutMode::Create).await?.is_none() {
                break;
            }
        }
        Ok(promise.finished())
    }

    /// Runs a race; returns the version of its winner, if there was one. Outer `None`: not offered, so stop.
    async fn run_round(
        &self,
        promise: &mut Promise,
        at: &Path,
        mode: &PutMode,
    ) -> Result<Option<Option<UpdateVersion>>, String> {
        promise.tries += 1;
        let outcome = race(self.endpoints, self.writer, self.options.racers, at, mode).await;
        let object = self.writer.read(&*self.endpoints[0].store, at).await?;
        match judge_race(&outcome, object.as_ref().map(|object| object.id.as_str())) {
            Ok(RaceOutcome::Won(version)) => return Ok(Some(Some(version))),
            Ok(RaceOutcome::Undecided(why)) => promise.mark_undecided(why),
            Ok(RaceOutcome::NotOffered(why)) => {
                promise.set_unless_broken(Verdict::NotOffered, why);
                return Ok(None);
            }
            Err(what) => promise.mark_broken(format!("round {}: {what}", promise.tries)),
        }
        Ok(Some(None))
    }

    async fn stale_update(&mut self) -> Result<Promise, String> {
        let words = "an update of a replaced or missing object is refused (If-Match)";
        let mut promise = Promise::new("stale_update", words);
        let mut repeats = false;
        for first in self.endpoints {
            for second in self.endpoints {
                let (at, id) = (self.new_path(), new_id());
                self.overwrite(&*first.store, &at, &id).await?;
                let old = self.read_existing(&*first.store, &at).await?.version;
                promise.tries += 1;
                let update = PutMode::Update(old.clone());
                let newer = new_id();
                match self.writer.put(&*first.store, &at, &newer, update.clone()).await {
                    WriteOutcome::Done(_) => {}
                    WriteOutcome::NotOffered(why) => {
                        promise.set_unless_broken(Verdict::NotOffered, why);
                        return Ok(promise);
                    }
                    WriteOutcome::Refused => {
                        promise.mark_broken("refused, although the version matches".into())
                    }
                    WriteOutcome::Unknown(why) => {
                        promise.mark_undecided(why);
                        continue;
                    }
                }
                let names = format!("{}, then {}", first.name, second.name);
                let stale = self.writer.put(&*second.store, &at, &new_id(), update.clone()).await;
                if matches!(stale, WriteOutcome::Done(_)) {
                    promise.mark_broken(format!("{names}: updated with the previous version"));
                } else if self.read_existing(&*second.store, &at).await?.id != newer {
                    promise.mark_broken(format!("{names}: refused, but stored"));
                }
                let missing = self.writer.put(&*second.store, &self.new_path(), &id, update).await;
                if matches!(missing, WriteOutcome::Done(_)) {
                    promise.mark_broken(format!("{}: updated a missing object", second.name));
                }
                // Writes the earlier content again, to see whether its ETag repeats.
                self.overwrite(&*first.store, &at, &id).await?;
                repeats |= self.read_existing(&*first.store, &at).await?.version.e_tag == old.e_tag;
            }
        }
        if repeats {
            self.notes.push(
                "equal contents have equal ETags: If-Match can't detect that an object was changed \
                 and changed back, unless each write has an ID in its content"
                    .into(),
            );
        }
        Ok(promise.finished())
    }

    async fn racing_updates(&self) -> Result<Promise, String> {
        let words = "of concurrent updates of one version, one succeeds and is stored";
        let mut promise = Promise::new("racing_updates", words);
        let (at, store) = (self.new_path(), &*self.endpoints[0].store);
        self.overwrite(store, &at, &new_id()).await?;
        let mut version = self.read_existing(store, &at).await?.version;
        for _ in 0..self.options.rounds {
            match self.run_round(&mut promise, &at, &PutMode::Update(version)).await? {
                None => break,
                Some(Some(won)) => version = won,
                Some(None) => version = self.read_existing(store, &at).await?.version,
            }
        }
        Ok(promise.finished())
    }

    async fn lost_replies(&self) -> Result<Promise, String> {
        let words =
            "a write whose reply was lost is refused when repeated, and identified as its own";
        let mut promise = Promise::new("lost_replies", words);
        for endpoint in self.endpoints {
            if let Err(why) = &endpoint.lossy {
                promise.set_unless_broken(Verdict::NotTried, format!("{}: {why}", endpoint.name));
                continue;
            }
            for _ in 0..LOSSES {
                let created = self.lose_reply(endpoint, &self.new_path(), PutMode::Create).await;
                let at = self.new_path();
                self.overwrite(&*endpoint.store, &at, &new_id()).await?;
                let version = self.read_existing(&*endpoint.store, &at).await?.version;
                let updated = self.lose_reply(endpoint, &at, PutMode::Update(version)).await;
                promise.tries += 2;
                for broken in [created, updated].into_iter().filter_map(Result::err) {
                    promise.mark_broken(format!("{}: {broken}", endpoint.name));
                }
            }
        }
        Ok(promise)
    }

    /// Loses the reply of a write, repeats the write, and checks which write the stored object is of.
    async fn lose_reply(&self, endpoint: &Endpoint, at: &Path, mode: PutMode) -> CheckResult {
        let Ok((proxy, store)) = &endpoint.lossy else { return Ok(()) };
        let (id, before) = (new_id(), proxy.lost().0);
        proxy.lose(1);
        let first = self.writer.put(&**store, at, &id, mode.clone()).await;
        proxy.lose(0);
        let (lost, reply) = proxy.lost();
        if lost == before {
            return Err(format!("no reply arrived that could be lost: {first:?}"));
        }
        if !reply.contains(" 200") {
            return Err(format!("refused, although the condition held: {reply:?}"));
        }
        if !matches!(first, WriteOutcome::Unknown(_)) {
            return Err(format!("the reply was lost, but the client returned {first:?}"));
        }
        let again = self.writer.put(&**store, at, &id, mode.clone()).await;
        if matches!(again, WriteOutcome::Done(_)) {
            return Err("the repeated write succeeded again".into());
        }
        let object = self.read_existing(&*endpoint.store, at).await?;
        if object.id != id || (self.writer.metadata && object.id_by_metadata.as_ref() != Some(&id))
        {
            return Err(format!("the object is not of the write with the lost reply: {object:?}"));
        }
        // A different write is refused as well, and the ID shows that the object is not its own.
        match self.writer.put(&**store, at, &new_id(), mode).await {
            WriteOutcome::Done(_) => Err("a different write succeeded".into()),
            _ => Ok(()),
        }
    }
}
