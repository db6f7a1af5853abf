//! A TCP relay before an engine that can hold what passes: the gate between two moments of a real exchange.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::harness::{Task, within};

/// What a relay can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What clients send.
    Requests = 0,
    /// What the engine sends.
    Answers = 1,
}

/// A running relay: connections to it end at its engine.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    gates: Arc<[Gate; 2]>,
    _task: Task,
}

#[derive(Debug)]
struct Gate {
    closed: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl Gate {
    fn open() -> Gate {
        Gate { closed: watch::Sender::new(false), waiting: watch::Sender::new(0) }
    }

    /// Returns at once when the gate is open.
    async fn pass(&self) {
        let mut closed = self.closed.subscribe();
        if *closed.borrow_and_update() {
            self.waiting.send_modify(|waiting| *waiting += 1);
            closed.wait_for(|closed| !closed).await.expect("the gate lives as long as its connections");
            self.waiting.send_modify(|waiting| *waiting -= 1);
        }
    }
}

impl Relay {
    /// Starts a relay to `engine` that lets everything pass.
    pub async fn start(engine: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let gates = Arc::new([Gate::open(), Gate::open()]);
        let shared = Arc::clone(&gates);
        let task = Task::spawn(async move {
            let mut running = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                running.spawn(carry(client, engine, Arc::clone(&shared)));
            }
        });
        Relay { address, gates, _task: task }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on nothing passes this way.
    pub fn hold(&self, way: Way) {
        self.gate(way).closed.send_replace(true);
    }

    /// Everything passes again.
    pub fn release(&self, way: Way) {
        self.gate(way).closed.send_replace(false);
    }

    /// Waits until `count` connections have something that is held.
    pub async fn wait_held(&self, way: Way, count: usize) {
        let mut waiting = self.gate(way).waiting.subscribe();
        let reached = within("something is held", waiting.wait_for(|waiting| *waiting >= count)).await;
        reached.expect("the relay runs");
    }

    fn gate(&self, way: Way) -> &Gate {
        &self.gates[way as usize]
    }
}

/// Carries both ways until one side closes; then both are closed, whole, as a peer that goes away does.
async fn carry(client: TcpStream, engine: SocketAddr, gates: Arc<[Gate; 2]>) {
    let Ok(server) = TcpStream::connect(engine).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("nodelay");
    }
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = copy(from_client, to_server, &gates[Way::Requests as usize]) => {}
        () = copy(from_server, to_client, &gates[Way::Answers as usize]) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, gate: &Gate) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        gate.pass().await;
        if to.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
}

#[tokio::test]
async fn a_held_way_lets_the_other_one_pass() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let relay = Relay::start(listener.local_addr().unwrap()).await;
    relay.hold(Way::Requests);
    let mut client = TcpStream::connect(relay.address()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    client.write_all(b"ask").await.unwrap();
    relay.wait_held(Way::Requests, 1).await;
    server.write_all(b"tell").await.unwrap();
    let mut told = [0; 4];
    client.read_exact(&mut told).await.unwrap();
    assert_eq!(server.try_read(&mut [0; 8]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    relay.release(Way::Requests);
    let mut asked = [0; 3];
    server.read_exact(&mut asked).await.unwrap();
    assert_eq!((&told, &asked), (b"tell", b"ask"));
    drop(client);
    assert_eq!(within("the close is passed on", server.read(&mut [0; 8])).await.unwrap(), 0);
}
