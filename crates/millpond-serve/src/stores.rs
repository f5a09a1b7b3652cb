//! [`StoreSet`]: several stores behind one cache.
//!
//! The cache has one underlying store, the set. The first part of an object's name there is the name of its store. Clients
//! and the S3 endpoint see the objects of one store by the store's own names.
//!
//! - **ST1** The first part depends on the store alone, not on the other stores or their order: a disk tier stays valid when
//!   a store is added.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::path::{Path, PathPart};
use object_store::prefix::PrefixStore;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

/// Deletions that are passed on together.
const DELETIONS_MAX: usize = 1000;

/// Several stores that share a cache, and its memory limit.
///
/// A store is known to clients by its `Display`, as `AmazonS3(BUCKET)`.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// use millpond_objects::CachedStore;
/// use millpond_serve::{MemoryChoice, Server, StoreSet};
/// use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (dir, data) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// # let socket = dir.path().join("socket");
/// let local = object_store::local::LocalFileSystem::new_with_prefix(data.path())?;
/// let stores = StoreSet::default().with(Arc::new(InMemory::new()))?.with(Arc::new(local))?;
/// let cache = CachedStore::builder(Arc::new(stores.clone())).shared(MemoryChoice::Auto).build()?;
/// // One of them, by way of the cache.
/// let view = stores.view(0, Arc::new(cache.clone()));
/// view.put(&Path::from("pond"), "water".into()).await?;
/// let server = Server::bind_stores(cache, &stores, &socket)?;
/// # drop(server);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct StoreSet {
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    name: String,
    /// The first part of its objects' names in the set (ST1).
    first: Path,
    store: Arc<dyn ObjectStore>,
    /// Only objects below one of these are served. Empty: all are.
    prefixes: Vec<Path>,
}

/// An object's name as a client gives it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Located {
    Inside(Path),
    /// The server does not serve it.
    Outside,
}

/// The store that a client has named.
#[derive(Clone, Debug)]
pub(crate) struct ClientScope {
    first: Option<Path>,
    prefixes: Arc<[Path]>,
}

/// The name of a store: its `Display`, and where it is, if that is not the service's default. `endpoint`: the URL of a store
/// that speaks the service's protocol.
///
/// A bucket of a test server may have the name of another one. A server and its clients that name their stores so never
/// take one for the other.
///
/// ```
/// use millpond_serve::store_name;
/// let store = object_store::memory::InMemory::new();
/// assert_eq!(store_name(&store, None), "InMemory");
/// assert_eq!(store_name(&store, Some("http://[::1]:9000/")), "InMemory at http://[::1]:9000");
/// ```
#[must_use]
pub fn store_name(store: &dyn ObjectStore, endpoint: Option<&str>) -> String {
    match endpoint.map(|url| url.trim_end_matches('/')).filter(|url| !url.is_empty()) {
        Some(url) => format!("{store} at {url}"),
        None => store.to_string(),
    }
}

impl StoreSet {
    /// Adds a store.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]: the set has a store of the same `Display`.
    pub fn with(self, store: Arc<dyn ObjectStore>) -> Result<StoreSet> {
        self.with_prefixes(store, Vec::new())
    }

    /// Adds a part of a store: the objects below the prefixes, by their whole names. Other objects are refused, and clients read
    /// them from their own stores. No prefixes: all objects.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]: the set has a store of the same `Display`.
    pub fn with_prefixes(
        self,
        store: Arc<dyn ObjectStore>,
        prefixes: impl IntoIterator<Item = Path>,
    ) -> Result<StoreSet> {
        let name = store.to_string();
        self.with_named(name, store, prefixes)
    }

    /// As [`with_prefixes`](StoreSet::with_prefixes), for clients that name the store so
    /// ([`SharedStore::named`](crate::SharedStore::named)). See [`store_name`].
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]: the set has a store of this name.
    pub fn with_named(
        mut self,
        name: String,
        store: Arc<dyn ObjectStore>,
        prefixes: impl IntoIterator<Item = Path>,
    ) -> Result<StoreSet> {
        if self.members.iter().any(|member| member.name == name) {
            let source = "the server has this store already".into();
            return Err(Error::AlreadyExists { path: name, source });
        }
        let all: BTreeSet<Path> = prefixes.into_iter().collect();
        let is_covered =
            |path: &Path| all.iter().any(|other| other != path && path.prefix_matches(other));
        // No part of the root: all objects.
        let is_whole = all.iter().any(|path| path.as_ref().is_empty());
        let prefixes = if is_whole {
            Vec::new()
        } else {
            all.iter().filter(|path| !is_covered(path)).cloned().collect()
        };
        let first = Path::from_iter([PathPart::from(name.as_str())]);
        self.members.push(Member { name, first, store, prefixes });
        Ok(self)
    }

    /// The names of the stores, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.members.iter().map(|member| &*member.name).collect()
    }

    /// The store of this number, by way of `cache`, which is a cache of the set.
    ///
    /// # Panics
    ///
    /// The set has no store of this number.
    #[must_use]
    pub fn view(&self, number: usize, cache: Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore> {
        Arc::new(PrefixStore::new(cache, self.members[number].first.clone()))
    }

    /// The store that a client names. `None`: the set does not have it.
    pub(crate) fn scope(&self, name: &str) -> Option<ClientScope> {
        let member = self.members.iter().find(|member| member.name == name)?;
        let prefixes = member.prefixes.clone().into();
        Some(ClientScope { first: Some(member.first.clone()), prefixes })
    }

    /// The store of an object of the set, and its name there.
    fn route(&self, location: &Path) -> Result<(&Member, Path)> {
        let found = self.members.iter().find_map(|member| {
            let rest = location.prefix_match(&member.first)?;
            Some((member, rest.collect::<Path>()))
        });
        let Some((member, inside)) = found else {
            let source = "the server has no store of this name".into();
            return Err(Error::NotFound { path: location.to_string(), source });
        };
        Ok((member, inside))
    }

    /// The same for one object, which has to be served.
    fn object(&self, location: &Path) -> Result<(&Member, Path)> {
        let (member, inside) = self.route(location)?;
        if !is_below(&inside, &member.prefixes) {
            let below: Vec<&str> = member.prefixes.iter().map(AsRef::as_ref).collect();
            let source =
                format!("the server serves {} below {} only", member.name, below.join(", "));
            return Err(Error::PermissionDenied {
                path: inside.to_string(),
                source: source.into(),
            });
        }
        Ok((member, inside))
    }
}

fn is_below(location: &Path, prefixes: &[Path]) -> bool {
    prefixes.is_empty() || prefixes.iter().any(|prefix| location.prefix_matches(prefix))
}

impl ClientScope {
    /// A cache of one store, whose names are the clients'.
    pub(crate) fn whole() -> ClientScope {
        ClientScope { first: None, prefixes: Arc::default() }
    }

    /// The name in the cache.
    pub(crate) fn locate(&self, location: &str) -> Result<Located> {
        let location = Path::parse(location)?;
        if !is_below(&location, &self.prefixes) {
            return Ok(Located::Outside);
        }
        Ok(Located::Inside(match &self.first {
            Some(first) => first.parts().chain(location.parts()).collect(),
            None => location,
        }))
    }

    /// The client's name of an object in the cache, if the client may read it.
    pub(crate) fn name_of(&self, in_cache: &Path) -> Option<String> {
        let inside: Path = match &self.first {
            Some(first) => in_cache.prefix_match(first)?.collect(),
            None => in_cache.clone(),
        };
        (!inside.as_ref().is_empty() && is_below(&inside, &self.prefixes)).then(|| inside.into())
    }

    /// The client's name of an object that an error names.
    pub(crate) fn name_for_client(&self, location: String) -> String {
        let Some(first) = &self.first else { return location };
        let rest = location.strip_prefix(first.as_ref()).and_then(|rest| rest.strip_prefix('/'));
        rest.map(str::to_owned).unwrap_or(location)
    }
}

impl fmt::Display for StoreSet {
    /// The same for each set: a disk tier names its objects by this and by their names in the set (ST1).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreSet")
    }
}

impl Member {
    fn name_in_set(&self, inside: &Path) -> Path {
        self.first.parts().chain(inside.parts()).collect()
    }

    fn meta_in_set(&self, meta: ObjectMeta) -> ObjectMeta {
        ObjectMeta { location: self.name_in_set(&meta.location), ..meta }
    }

    /// The prefixes to list for a list of `asked`.
    fn lists(&self, asked: &Path) -> Vec<Path> {
        if is_below(asked, &self.prefixes) {
            return vec![asked.clone()];
        }
        self.prefixes.iter().filter(|prefix| prefix.prefix_matches(asked)).cloned().collect()
    }

    fn list(&self, asked: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        let lists = self.lists(asked).into_iter();
        let lists: Vec<_> = lists.map(|prefix| self.store.list(some(&prefix))).collect();
        let this = self.clone();
        let all = stream::iter(lists).flatten();
        all.map_ok(move |meta| this.meta_in_set(meta)).boxed()
    }

    async fn list_with_delimiter(&self, asked: &Path) -> Result<ListResult> {
        if is_below(asked, &self.prefixes) {
            let mut result = self.store.list_with_delimiter(some(asked)).await?;
            let prefixes = result.common_prefixes.iter().map(|prefix| self.name_in_set(prefix));
            result.common_prefixes = prefixes.collect();
            result.objects =
                result.objects.into_iter().map(|meta| self.meta_in_set(meta)).collect();
            return Ok(result);
        }
        // Above the prefixes: the folders on the way to those that have an object.
        let mut folders = BTreeSet::new();
        for prefix in self.lists(asked) {
            let child = prefix.prefix_match(asked).and_then(|mut rest| rest.next());
            let Some(child) = child else { continue };
            let folder: Path = asked.parts().chain([child]).collect();
            if !folders.contains(&folder)
                && self.store.list(some(&prefix)).try_next().await?.is_some()
            {
                folders.insert(folder);
            }
        }
        let common_prefixes = folders.iter().map(|folder| self.name_in_set(folder)).collect();
        Ok(ListResult {
            common_prefixes,
            objects: Vec::new(),
            #[cfg(feature = "object_store_0_14")]
            extensions: Default::default(),
        })
    }
}

/// A list of the root has no prefix.
fn some(prefix: &Path) -> Option<&Path> {
    (!prefix.as_ref().is_empty()).then_some(prefix)
}

#[async_trait]
impl ObjectStore for StoreSet {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let (member, inside) = self.object(location)?;
        member.store.put_opts(&inside, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let (member, inside) = self.object(location)?;
        member.store.put_multipart_opts(&inside, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (member, inside) = self.object(location)?;
        let mut result = member.store.get_opts(&inside, options).await?;
        result.meta.location = location.clone();
        Ok(result)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (member, inside) = self.object(location)?;
        member.store.get_ranges(&inside, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let set = self.clone();
        let chunks = locations.ready_chunks(DELETIONS_MAX);
        chunks.flat_map(move |chunk| stream::iter(set.deletions(chunk)).flatten()).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let Some(prefix) = prefix.filter(|prefix| !prefix.as_ref().is_empty()) else {
            let all: Vec<_> =
                self.members.iter().map(|member| member.list(&Path::default())).collect();
            return stream::iter(all).flatten().boxed();
        };
        match self.route(prefix) {
            Ok((member, inside)) => member.list(&inside),
            Err(error) => stream::once(std::future::ready(Err(error))).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.cloned().unwrap_or_default();
        if prefix.as_ref().is_empty() {
            let source = "a folder of all stores has no list".into();
            return Err(Error::NotSupported { source });
        }
        let (member, inside) = self.route(&prefix)?;
        member.list_with_delimiter(&inside).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let ((member, inside), (target, inside_target)) = (self.object(from)?, self.object(to)?);
        check_one_store(member, target)?;
        member.store.copy_opts(&inside, &inside_target, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let ((member, inside), (target, inside_target)) = (self.object(from)?, self.object(to)?);
        check_one_store(member, target)?;
        member.store.rename_opts(&inside, &inside_target, options).await
    }
}

fn check_one_store(member: &Member, target: &Member) -> Result<()> {
    if member.name == target.name {
        return Ok(());
    }
    let what = format!("{} does not copy to {}", member.name, target.name);
    Err(Error::NotSupported { source: what.into() })
}

impl StoreSet {
    /// The streams of deletions: those of one store in a row are passed on together.
    fn deletions(&self, locations: Vec<Result<Path>>) -> Vec<BoxStream<'static, Result<Path>>> {
        let mut streams: Vec<BoxStream<'static, Result<Path>>> = Vec::new();
        let routed = locations.into_iter().map(|location| self.object(&location?));
        let mut routed = routed.peekable();
        while let Some(next) = routed.next() {
            let (member, inside) = match next {
                Ok(found) => found,
                Err(error) => {
                    streams.push(stream::once(std::future::ready(Err(error))).boxed());
                    continue;
                }
            };
            let mut insides = vec![Ok(inside)];
            let is_next = |next: &Result<(&Member, Path)>| {
                next.as_ref().is_ok_and(|(other, _)| other.name == member.name)
            };
            while let Some(Ok((_, inside))) = routed.next_if(is_next) {
                insides.push(Ok(inside));
            }
            let deleted = member.store.delete_stream(stream::iter(insides).boxed());
            let member = member.clone();
            streams.push(deleted.map_ok(move |inside| member.name_in_set(&inside)).boxed());
        }
        streams
    }
}
