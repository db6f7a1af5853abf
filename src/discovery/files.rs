//! `--pods FILE-or-DIR`: pod manifests from files, watched for changes.
//!
//! The content is read and compared at every look. Looking at times and sizes alone would miss an edit within the
//! file system's time resolution; reading costs microseconds for files of this size. Through symbolic links (a mounted
//! ConfigMap) the content is followed wherever it moves.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::FleetBuilder;
use super::documents::{Documents, read_documents};
use super::manifest::{Manifest, PodReader};
use crate::fleet::{AdapterSpec, PodKey, PodSpec};
use crate::knobs::PdKnobs;

/// How often the files are looked at, unless told otherwise.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A longer file is not read.
const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024;
/// Files of a directory beyond this many are not read.
const MAX_FILES: usize = 4096;

/// What a look at the files found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// Every pod in force, by file name and position in the file.
    pub specs: Vec<PodSpec>,
    /// Every LoRA adapter in force.
    pub adapters: Vec<AdapterSpec>,
    /// What is wrong, one sentence each.
    pub problems: Vec<String>,
}

/// The files of `--pods` and what they last said. Synchronous: the watcher task calls it on a blocking thread.
#[derive(Debug)]
pub struct PodFiles {
    path: PathBuf,
    files: BTreeMap<PathBuf, FileState>,
    reader: PodReader,
    hasher: RandomState,
    /// What is wrong with the path itself.
    path_problem: Option<String>,
    last: Option<Found>,
}

#[derive(Debug, Default)]
struct FileState {
    hash: Option<u64>,
    /// The pods of the last version that could be read in full, or of the readable documents when there was none.
    pods: Vec<Manifest>,
    /// The adapters of the same version.
    adapters: Vec<AdapterSpec>,
    /// A whole version was read once.
    good: bool,
    problems: Vec<String>,
    /// What the last look found instead, when it found pods missing: it counts if the next look finds the same.
    doubted: Option<Doubted>,
}

/// A finding that may be the middle of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubted {
    /// The file was missing.
    Missing,
    /// A text with this hash.
    Text(u64),
}

impl FileState {
    /// Some pod or adapter in force is not among these, or has lost its address or instances (which stand at the end of a
    /// manifest).
    fn loses(&self, documents: &Documents) -> bool {
        let now: HashMap<_, bool> = documents.pods.iter().map(|pod| (pod.key(), pod.has_address())).collect();
        let adapters: HashMap<_, bool> =
            documents.adapters.iter().map(|adapter| (of(adapter), adapter.instances.is_empty())).collect();
        self.pods.iter().any(|pod| now.get(&pod.key()).is_none_or(|there| pod.has_address() && !there))
            || self
                .adapters
                .iter()
                .any(|adapter| adapters.get(&of(adapter)).is_none_or(|empty| *empty && !adapter.instances.is_empty()))
    }

    fn says_nothing(&self) -> bool {
        self.pods.is_empty() && self.adapters.is_empty()
    }
}

/// What names an adapter.
fn of(adapter: &AdapterSpec) -> (&str, &str) {
    (&adapter.namespace, &adapter.name)
}

/// One file as it is now.
enum Content {
    Text(String),
    Missing,
    Unreadable(String),
}

impl PodFiles {
    /// Files at `path`; the annotation's profiles start from the gateway-wide knobs `base`.
    pub fn new(path: impl Into<PathBuf>, base: Arc<PdKnobs>) -> PodFiles {
        PodFiles {
            path: path.into(),
            files: BTreeMap::new(),
            reader: PodReader::new(base),
            hasher: RandomState::new(),
            path_problem: None,
            last: None,
        }
    }

    /// Looks once. `None` when nothing changed since the last look.
    ///
    /// A file with a broken document keeps its last good version. One that suddenly lacks pods, or is missing
    /// altogether, keeps it until the next look finds the same, since editors truncate, rename, and write in pieces:
    /// half a file of several documents is a good file with fewer pods.
    pub fn poll_once(&mut self) -> Option<Found> {
        let mut changed = self.last.is_none();
        match list(&self.path) {
            Ok((paths, omitted)) => {
                let problem =
                    (omitted > 0).then(|| format!("{}: {omitted} more files are not read", self.path.display()));
                changed |= self.path_problem != problem;
                self.path_problem = problem;
                let mut present: BTreeMap<PathBuf, Content> = BTreeMap::new();
                for path in paths {
                    let content = read(&path);
                    present.insert(path, content);
                }
                for path in self.files.keys() {
                    if !present.contains_key(path) {
                        present.insert(path.clone(), Content::Missing);
                    }
                }
                for (path, content) in present {
                    changed |= self.update(&path, content);
                }
            }
            Err(text) => {
                changed |= self.path_problem.as_ref() != Some(&text);
                self.path_problem = Some(text);
            }
        }
        if !changed {
            return None;
        }
        let found = self.collect();
        (self.last.as_ref() != Some(&found)).then(|| {
            self.last = Some(found.clone());
            found
        })
    }

    /// Takes one file's content; true when the file says something new.
    fn update(&mut self, path: &Path, content: Content) -> bool {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let state = self.files.entry(path.to_owned()).or_default();
        let text = match content {
            Content::Text(text) => text,
            Content::Unreadable(text) => {
                let problems = vec![format!("{name}: {text}; its last good version stays in force")];
                let changed = state.problems != problems;
                state.problems = problems;
                state.hash = None;
                return changed;
            }
            // A file named on the command line that goes away is a mistake, not a wish for an empty fleet.
            Content::Missing if path == self.path => {
                let problems = vec![format!("{name} does not exist; its last good version stays in force")];
                let changed = state.problems != problems;
                state.problems = problems;
                state.hash = None;
                return changed;
            }
            Content::Missing if state.doubted == Some(Doubted::Missing) || state.says_nothing() => {
                self.files.remove(path);
                return true;
            }
            Content::Missing => {
                state.doubted = Some(Doubted::Missing);
                state.hash = None;
                return false;
            }
        };
        let hash = self.hasher.hash_one(&text);
        if state.hash == Some(hash) {
            state.doubted = None;
            return false;
        }
        let documents = read_documents(&text);
        let doubted = Some(Doubted::Text(hash));
        if documents.broken.is_empty() && state.doubted != doubted && state.loses(&documents) {
            state.doubted = doubted;
            return false;
        }
        state.doubted = None;
        state.hash = Some(hash);
        state.problems = documents.foreign.iter().map(|text| format!("{name}: {text}")).collect();
        let broken = !documents.broken.is_empty();
        for error in &documents.broken {
            let remains = if state.good { "; the file's last good version stays in force" } else { "" };
            state.problems.push(format!("{name}: {error}{remains}"));
        }
        if !broken || !state.good {
            state.pods = documents.pods;
            state.adapters = documents.adapters;
            state.good = !broken;
        }
        true
    }

    /// All pods and adapters of all files. The first of several with one key counts.
    fn collect(&mut self) -> Found {
        let mut found = Found { problems: self.path_problem.iter().cloned().collect(), ..Found::default() };
        let mut adapters: HashMap<(Arc<str>, Arc<str>), String> = HashMap::new();
        let mut owners: HashMap<PodKey, String> = HashMap::new();
        for (path, state) in &self.files {
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
            found.problems.extend(state.problems.iter().cloned());
            for manifest in &state.pods {
                let mut reading = self.reader.read(manifest);
                found.problems.extend(reading.problems.drain(..).map(|text| format!("{name}: {text}")));
                found.problems.append(&mut reading.config_problems);
                for spec in reading.specs() {
                    if let Some(owner) = owners.get(&spec.key) {
                        found
                            .problems
                            .push(format!("{name}: pod {} is already in {owner}; the first counts", spec.key));
                    } else {
                        owners.insert(spec.key.clone(), name.clone().into_owned());
                        found.specs.push(spec);
                    }
                }
            }
            for adapter in &state.adapters {
                let key = (Arc::clone(&adapter.namespace), Arc::clone(&adapter.name));
                if let Some(owner) = adapters.get(&key) {
                    found.problems.push(format!(
                        "{name}: adapter {}/{} is already in {owner}; the first counts",
                        adapter.namespace, adapter.name
                    ));
                } else {
                    adapters.insert(key, name.clone().into_owned());
                    found.adapters.push(adapter.clone());
                }
            }
        }
        self.reader.retain(&found.specs);
        found
    }
}

/// The files at `path`, ordered by name, and how many were left out.
fn list(path: &Path) -> Result<(Vec<PathBuf>, usize), String> {
    let directory = match std::fs::read_dir(path) {
        Ok(directory) => directory,
        Err(error) if error.kind() == ErrorKind::NotADirectory => return Ok((vec![path.to_owned()], 0)),
        // Whether it ought to be a file or a directory nobody can say; either way the last good version stays.
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    };
    let mut paths = Vec::new();
    for entry in directory {
        let entry = entry.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let candidate = entry.path();
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let wanted = candidate.extension().is_some_and(|end| ["yaml", "yml", "json"].iter().any(|want| end == *want));
        if !hidden && wanted && !candidate.is_dir() {
            paths.push(candidate);
        }
    }
    paths.sort();
    let omitted = paths.len().saturating_sub(MAX_FILES);
    paths.truncate(MAX_FILES);
    Ok((paths, omitted))
}

fn read(path: &Path) -> Content {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Content::Missing,
        Err(error) => return Content::Unreadable(format!("cannot be read: {error}")),
    };
    let mut bytes = Vec::new();
    match file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes) {
        Ok(_) if bytes.len() as u64 > MAX_FILE_BYTES => Content::Unreadable("is too long".to_owned()),
        Ok(_) => match String::from_utf8(bytes) {
            Ok(text) => Content::Text(text),
            Err(_) => Content::Unreadable("is not UTF-8".to_owned()),
        },
        Err(error) => Content::Unreadable(format!("cannot be read: {error}")),
    }
}

/// Looks at the files every `interval` until `cancel`, and gives each change to `builder`. Does the first look before
/// it returns, so that the fleet is there when the gateway begins to serve.
pub async fn watch_files(
    files: PodFiles,
    builder: Arc<FleetBuilder>,
    interval: Duration,
    tracker: &TaskTracker,
    cancel: CancellationToken,
) {
    let Some(mut files) = look(files, &builder, tracker).await else { return };
    let blocking = tracker.clone();
    tracker.spawn(async move {
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(interval) => {}
            }
            match look(files, &builder, &blocking).await {
                Some(same) => files = same,
                None => return,
            }
        }
    });
}

/// One look, on a blocking thread. `None` when the runtime is going down.
async fn look(mut files: PodFiles, builder: &FleetBuilder, tracker: &TaskTracker) -> Option<PodFiles> {
    let looked = tracker.spawn_blocking(move || {
        let found = files.poll_once();
        (files, found)
    });
    let (files, found) = match looked.await {
        Ok(looked) => looked,
        Err(error) => {
            tracing::error!(%error, "the pod files are no longer watched");
            return None;
        }
    };
    if let Some(found) = found {
        builder.set_problems(found.problems);
        builder.apply_all(found.specs, found.adapters);
    }
    Some(files)
}
