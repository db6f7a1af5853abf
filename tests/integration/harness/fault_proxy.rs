//! A TCP proxy that breaks what goes through it, as told at run time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tandem::rng::Rng;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::Task;

/// Chunks on their way in one direction of one connection; more are not read.
const IN_FLIGHT: usize = 1_024;

/// What happens to bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hole {
    /// They pass.
    #[default]
    None,
    /// Nothing is read. Once the hole is closed, what waited goes on: a network that stood still.
    Stalls,
    /// They are read and forgotten, and the connections that there are say nothing ever again, also when the hole is
    /// closed: a peer that is gone without a word.
    Swallows,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fault {
    /// Every chunk takes that much longer, each way.
    pub latency: Duration,
    /// Bytes in a second that each connection carries each way; 0 = as many as there are.
    pub rate: u32,
    /// This share of chunks takes half a second longer; those behind them wait.
    pub slow_share: f64,
    /// See [`Hole`].
    pub hole: Hole,
    /// New connections are reset at once.
    pub refuses: bool,
    /// How often all connections have been reset.
    pub resets: u64,
}

/// A running proxy to one server; ends when dropped.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    fault: Arc<watch::Sender<Fault>>,
    made: Arc<AtomicU64>,
    _task: Task,
}

impl FaultProxy {
    /// Starts one without faults.
    pub async fn start(target: SocketAddr) -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let fault = Arc::new(watch::Sender::new(Fault::default()));
        let made = Arc::new(AtomicU64::new(0));
        let task = Task::spawn(accept(listener, target, Arc::clone(&fault), Arc::clone(&made)));
        FaultProxy { address, fault, made, _task: task }
    }

    /// The address as `REDIS_URL` wants it.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// From now on this is wrong, and nothing else.
    pub fn set(&self, fault: Fault) {
        self.fault.send_modify(|now| *now = Fault { resets: now.resets, ..fault });
    }

    /// Nothing is wrong any more.
    pub fn heal(&self) {
        self.set(Fault::default());
    }

    /// Resets all connections that there are.
    pub fn reset_all(&self) {
        self.fault.send_modify(|now| now.resets += 1);
    }

    /// Connections that were made since the start, refused ones included.
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, fault: Arc<watch::Sender<Fault>>, made: Arc<AtomicU64>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let number = made.fetch_add(1, Ordering::Relaxed);
        if fault.borrow().refuses {
            // Closed with a reset when it is dropped.
            let _ = client.set_zero_linger();
            continue;
        }
        connections.spawn(relay(client, target, fault.subscribe(), number));
        while connections.try_join_next().is_some() {}
    }
}

async fn relay(mut client: TcpStream, target: SocketAddr, fault: watch::Receiver<Fault>, number: u64) {
    let resets = fault.borrow().resets;
    let Ok(mut server) = TcpStream::connect(target).await else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut watched, mut hole) = (fault.clone(), fault.clone());
    let carried = async {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            biased;
            _ = hole.wait_for(|now| now.hole == Hole::Swallows) => true,
            () = pump(from_client, to_server, fault.clone(), Rng::new(2 * number)) => false,
            () = pump(from_server, to_client, fault, Rng::new(2 * number + 1)) => false,
        }
    };
    // Until it is reset, or falls into the hole.
    let mut reset = tokio::select! {
        swallowed = carried => swallowed,
        _ = watched.wait_for(|now| now.resets != resets) => true,
    };
    if reset && watched.borrow().resets == resets {
        let mut nowhere = tokio::io::sink();
        reset = tokio::select! {
            _ = tokio::io::copy(&mut client, &mut nowhere) => false,
            _ = watched.wait_for(|now| now.resets != resets) => true,
        };
    }
    if reset {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// Carries one direction until either side ends.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut fault: watch::Receiver<Fault>,
    mut rng: Rng,
) {
    let (chunks, mut due) = mpsc::channel::<(Instant, Vec<u8>)>(IN_FLIGHT);
    let mut open = fault.clone();
    // What cannot be read any more ends the other half as soon as everything is written.
    let read = async move {
        let mut buffer = vec![0; 16 << 10];
        while fault.wait_for(|now| now.hole != Hole::Stalls).await.is_ok() {
            let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
            let now = *fault.borrow();
            if now.rate > 0 {
                tokio::time::sleep(Duration::from_secs_f64(length as f64 / f64::from(now.rate))).await;
            }
            let slow = if rng.unit() < now.slow_share { Duration::from_millis(500) } else { Duration::ZERO };
            if chunks.send((Instant::now() + now.latency + slow, buffer[..length].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let write = async move {
        while let Some((at, chunk)) = due.recv().await {
            tokio::time::sleep_until(at).await;
            let open = open.wait_for(|now| now.hole != Hole::Stalls).await.is_ok();
            if !open || to.write_all(&chunk).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(read, write);
}
