//! What a listener presents, kept up to date.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::accept::REASONS;
use super::files::ServerPem;
use super::load::{Loaded, server};
use super::{Listener, TlsError};
use crate::clock::Clock;
use crate::knobs::TlsFiles;
use crate::telemetry::Metrics;

/// How often the files are looked at. Their content is compared, so that no way of replacing them is missed: in place,
/// by renaming, or by the symbolic link of a mounted Secret.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// One listener's side of TLS.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    files: TlsFiles,
    current: ArcSwap<ServerConfig>,
    /// Of what is in force.
    first_hash: u64,
    hasher: RandomState,
    /// Why the files as they are now are not in force.
    problem: RwLock<Option<String>>,
    metrics: Arc<Metrics>,
    clock: Clock,
}

impl Server {
    /// Reads the files for the first time. What is wrong with them is an error, which ought to stop the start.
    pub fn load(
        listener: Listener,
        files: &TlsFiles,
        metrics: &Arc<Metrics>,
        clock: Clock,
    ) -> Result<Arc<Server>, TlsError> {
        let pem = ServerPem::read(files)?;
        let loaded = server(&pem, listener)?;
        let hasher = RandomState::new();
        metrics.begin_tls(listener.name(), &REASONS);
        let server = Server {
            listener,
            files: files.clone(),
            current: ArcSwap::new(Arc::clone(&loaded.config)),
            first_hash: hasher.hash_one(&pem),
            hasher,
            problem: RwLock::default(),
            metrics: Arc::clone(metrics),
            clock,
        };
        server.tell(&loaded, "TLS");
        Ok(Arc::new(server))
    }

    /// Which listener it is.
    pub fn listener(&self) -> Listener {
        self.listener
    }

    /// What a handshake that begins now goes by.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.current.load_full()
    }

    /// Where its failures are counted.
    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Why the files as they are now are not in force; `None` while they are.
    pub fn problem(&self) -> Option<String> {
        self.problem.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.write().unwrap_or_else(PoisonError::into_inner) = problem;
    }

    fn tell(&self, loaded: &Loaded, what: &str) {
        let listener = self.listener.name();
        let Some(facts) = &loaded.facts else {
            tracing::info!(listener, mutual = self.files.client_ca.is_some(), "{what}");
            return;
        };
        self.metrics.set_tls_expiry(listener, facts.expires);
        let now = i64::try_from(self.clock.epoch_ms() / 1000).unwrap_or(i64::MAX);
        let days_left = (facts.expires - now).div_euclid(24 * 3600);
        let serial = &facts.serial;
        tracing::info!(listener, serial, days_left, mutual = self.files.client_ca.is_some(), "{what}");
        if facts.expires <= now {
            tracing::warn!(listener, serial, "the certificate has expired: clients will refuse it");
        }
    }
}

/// One listener under watch.
struct Watched {
    server: Arc<Server>,
    /// Of the files that are in force.
    in_force: u64,
    /// What the last look found wrong: it counts if the next look finds the same, since files are replaced one by one.
    doubted: Option<TlsError>,
    /// What was told already.
    told: Option<TlsError>,
}

impl Watched {
    fn new(server: Arc<Server>) -> Watched {
        let in_force = server.first_hash;
        Watched { server, in_force, doubted: None, told: None }
    }

    fn look(&mut self) {
        match ServerPem::read(&self.server.files) {
            Ok(pem) => {
                let hash = self.server.hasher.hash_one(&pem);
                if hash == self.in_force {
                    self.settle();
                    return;
                }
                match server(&pem, self.server.listener) {
                    Ok(loaded) => {
                        self.server.current.store(Arc::clone(&loaded.config));
                        self.in_force = hash;
                        self.settle();
                        self.server.metrics.tls_reloaded(self.server.listener.name(), true);
                        self.server.tell(&loaded, "new TLS files are in force for new connections");
                    }
                    Err(problem) => self.complain(problem),
                }
            }
            Err(problem) => self.complain(problem),
        }
    }

    fn settle(&mut self) {
        self.doubted = None;
        if self.told.take().is_some() {
            self.server.set_problem(None);
        }
    }

    fn complain(&mut self, problem: TlsError) {
        if self.told.as_ref() == Some(&problem) {
            return;
        }
        if self.doubted.as_ref() != Some(&problem) {
            self.doubted = Some(problem);
            return;
        }
        let listener = self.server.listener.name();
        self.server.metrics.tls_reloaded(listener, false);
        tracing::warn!(listener, "the TLS files cannot be used, what was in force stays: {problem}");
        self.server
            .set_problem(Some(format!("TLS of the {listener} listener: {problem}; what was in force before stays")));
        self.told = Some(problem);
        self.doubted = None;
    }
}

/// Looks at the files of all listeners every `interval` until `stop`.
pub async fn watch(servers: Vec<Arc<Server>>, interval: Duration, tasks: TaskTracker, stop: CancellationToken) {
    let mut watched: Vec<Watched> = servers.into_iter().map(Watched::new).collect();
    while !watched.is_empty() {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = stop.cancelled() => return,
        }
        let look = move || {
            watched.iter_mut().for_each(Watched::look);
            watched
        };
        match tasks.spawn_blocking(look).await {
            Ok(same) => watched = same,
            Err(error) => {
                tracing::error!(%error, "the TLS files are no longer watched");
                return;
            }
        }
    }
}

#[cfg(test)]
pub(super) mod testing {
    //! Looks when a test says so.

    use super::{Arc, Server, Watched};

    pub(in crate::tls) fn watcher(server: &Arc<Server>) -> impl FnMut() {
        let mut watched = Watched::new(Arc::clone(server));
        move || watched.look()
    }
}
