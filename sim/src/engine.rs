//! Starting an engine, and the handle that tests and programs hold.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::config::{EngineConfig, Role};
use crate::fault::Fault;
use crate::hold::Hold;
use crate::listen;
use crate::record::Record;
use crate::report::{Stats, Violation};
use crate::state::Core;

/// A running engine. Clones are handles to the same one; it runs until it is stopped or killed, or its runtime ends.
#[derive(Clone, Debug)]
pub struct Engine {
    core: Arc<Core>,
}

/// Starts an engine and returns once it listens.
///
/// # Errors
/// A configuration that cannot work, or an address that cannot be bound.
pub async fn start(config: EngineConfig) -> io::Result<Engine> {
    config.check()?;
    let listener = TcpListener::bind((config.bind, config.port)).await?;
    let side_channel = match config.role {
        Role::Prefill => Some(TcpListener::bind((config.bind, config.bootstrap_port)).await?),
        Role::Decode | Role::Combined => None,
    };
    let side_port = side_channel.as_ref().map(TcpListener::local_addr).transpose()?.map_or(0, |address| address.port());
    let core = Arc::new(Core::new(config, listener.local_addr()?, side_port));
    listen::accept(&core, listener);
    if let Some(listener) = side_channel {
        listen::side_channel(&core, listener);
        listen::reap(&core);
    }
    Ok(Engine { core })
}

impl Engine {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.core.address
    }

    /// Where a prefill engine's KV side channel listens: the bootstrap port of SGLang and Mooncake, the endpoint of
    /// TensorRT-LLM's transceiver. 0 for other roles.
    pub fn bootstrap_port(&self) -> u16 {
        self.core.side_channel_port
    }

    /// Its configuration.
    pub fn config(&self) -> &EngineConfig {
        &self.core.config
    }

    /// Requests so far, oldest first, within the limit. Probes are left out unless `record_probes` is set.
    pub fn records(&self) -> Vec<Record> {
        self.core.records.all()
    }

    /// Requests so far whose path starts with `path`.
    pub fn records_for(&self, path: &str) -> Vec<Record> {
        self.records_where(|record| record.path.starts_with(path))
    }

    /// Requests so far that satisfy `condition`, oldest first. Only these are copied.
    pub fn records_where(&self, condition: impl Fn(&Record) -> bool) -> Vec<Record> {
        self.core.records.matching(condition)
    }

    /// Forgets all records; numbers go on.
    pub fn clear_records(&self) {
        self.core.records.clear();
    }

    /// Stops inference requests that arrive from now on, before anything is done for them.
    pub fn hold(&self) -> Hold {
        self.core.gate.hold()
    }

    /// Scripts a fault. Ignored when the limit of waiting faults is reached; see [`crate::Limits::faults`].
    pub fn script(&self, fault: Fault) {
        self.core.faults.add(fault, self.core.config.limits.faults);
    }

    /// Forgets all scripted faults.
    pub fn clear_faults(&self) {
        self.core.faults.clear();
    }

    /// Gauges and counters now.
    pub fn stats(&self) -> Stats {
        self.core.expire_leases();
        self.core.stats()
    }

    /// Breaches of the hand-off protocol so far. A correct gateway causes none.
    pub fn violations(&self) -> Vec<Violation> {
        self.core.violations()
    }

    /// Waits until `condition` holds; it is looked at again whenever a record, a gauge or the violations change. Tests wrap
    /// it in a deadline.
    pub async fn wait_until(&self, condition: impl Fn(&Engine) -> bool) {
        let mut version = self.core.version.subscribe();
        while !condition(self) {
            // The sender lives in `self`, so waiting cannot fail.
            let _ = version.changed().await;
        }
    }

    /// Closes the listener: connections are refused, open ones live on. Returns when it is closed.
    pub async fn pause_listening(&self) {
        listen::stop_accepting(&self.core).await;
    }

    /// Listens again on the same address.
    ///
    /// # Errors
    /// When the address was taken in the meantime.
    pub async fn resume_listening(&self) -> io::Result<()> {
        let listener = TcpListener::bind(self.core.address).await?;
        listen::accept(&self.core, listener);
        Ok(())
    }

    /// Stops gracefully: refuses connections, finishes what it serves, then ends. Held and stalled requests keep it waiting.
    pub async fn stop(&self) {
        listen::stop_accepting(&self.core).await;
        self.core.ending.drain.cancel();
        self.core.connections.close();
        self.core.connections.wait().await;
        self.kill();
        self.ended().await;
    }

    /// Stops as a real engine does on SIGTERM: generations end with `finish_reason: "abort"`, and what is still there
    /// after `grace` is reset.
    pub async fn terminate(&self, grace: Duration) {
        self.core.abort.cancel();
        // Running out of time is no error here: the rest is killed.
        let _ = tokio::time::timeout(grace, self.stop()).await;
        self.kill();
        self.ended().await;
    }

    /// Dies: closes the listener and resets all connections, as soon as their tasks run. See [`Engine::ended`].
    pub fn kill(&self) {
        self.core.ending.kill.cancel();
    }

    /// Waits until a stopped, killed or crashed engine holds no socket any more.
    pub async fn ended(&self) {
        self.core.ending.kill.cancelled().await;
        listen::stop_accepting(&self.core).await;
        self.core.connections.close();
        self.core.connections.wait().await;
        self.core.tasks.close();
        self.core.tasks.wait().await;
    }
}
