//! Who gets in, and who cannot keep others out.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::*;

/// Generous: only reached when something is broken.
const SOON: Duration = Duration::from_secs(30);

struct Scene {
    made: Made,
    metrics: Arc<Metrics>,
    address: SocketAddr,
    _accepting: tokio_util::task::AbortOnDropHandle<()>,
}

impl Scene {
    /// A listener that echoes one line of each connection.
    async fn new(client_ca: Option<&str>, places: usize) -> Option<Scene> {
        let made = Made::new()?;
        made.authority("foreign");
        made.certificate("stranger", "foreign");
        let metrics = metrics();
        let server =
            Server::load(Listener::Front, &made.files("server", client_ca), &metrics, Clock::system()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut incoming = Incoming::new(listener, Some(server)).with_places(places);
        let address = incoming.local_addr().unwrap();
        #[allow(clippy::disallowed_methods, reason = "real sockets live in real time; the test ends them")]
        let accepting = tokio::spawn(async move {
            loop {
                let (mut connection, _) = incoming.accept().await;
                tokio::spawn(async move {
                    let mut four = [0; 4];
                    if connection.read_exact(&mut four).await.is_ok() {
                        let _ = connection.write_all(&four).await;
                        let _ = connection.shutdown().await;
                    }
                });
            }
        });
        Some(Scene { made, metrics, address, _accepting: tokio_util::task::AbortOnDropHandle::new(accepting) })
    }

    /// True when a client with that certificate is served.
    async fn serves(&self, cert: Option<&str>) -> bool {
        let config = client(&self.made.client(cert), b"http/1.1").unwrap();
        let exchange = async {
            let stream = TcpStream::connect(self.address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            let mut stream = TlsConnector::from(config).connect(name, stream).await?;
            stream.write_all(b"ping").await?;
            let mut answer = Vec::new();
            // A refusal of the client's certificate arrives after the client's part of the handshake.
            stream.read_to_end(&mut answer).await?;
            Ok::<_, std::io::Error>(answer == b"ping")
        };
        tokio::time::timeout(SOON, exchange).await.unwrap().unwrap_or(false)
    }

    fn failures(&self, reason: &str) -> i64 {
        let series = format!(r#"tandem_tls_handshake_failures_total{{listener="front",reason="{reason}"}}"#);
        value(&self.metrics, &series).unwrap()
    }

    async fn fails(&self, reason: &str, times: i64) {
        let counted = async {
            while self.failures(reason) < times {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let counted = tokio::time::timeout(SOON, counted).await;
        let all: Vec<_> = accept::REASONS.iter().map(|reason| (reason, self.failures(reason))).collect();
        assert!(counted.is_ok() && self.failures(reason) == times, "{reason}: {all:?}");
    }
}

#[tokio::test]
async fn without_authorities_anybody_who_speaks_tls_comes_in() {
    let Some(scene) = Scene::new(None, 8).await else { return };
    assert!(scene.serves(None).await);
    assert!(scene.serves(Some("stranger")).await);
    // No TLS.
    let mut plain = TcpStream::connect(scene.address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    scene.fails("protocol", 1).await;
    // A probe of a load balancer.
    drop(TcpStream::connect(scene.address).await.unwrap());
    scene.fails("closed", 1).await;
    // A client that does not believe our authority.
    let doubts = ClientFiles { authorities: Some(scene.made.path("foreign.crt")), ..ClientFiles::default() };
    let stream = TcpStream::connect(scene.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(client(&doubts, b"http/1.1").unwrap());
    assert!(connector.connect(name.clone(), stream).await.is_err());
    scene.fails("refused", 1).await;
    // One that is told to believe anybody.
    let believes = ClientFiles { skip_verify: true, ..doubts };
    let stream = TcpStream::connect(scene.address).await.unwrap();
    assert!(TlsConnector::from(client(&believes, b"http/1.1").unwrap()).connect(name, stream).await.is_ok());
    // One that speaks another protocol.
    let stream = TcpStream::connect(scene.address).await.unwrap();
    let other = client(&scene.made.client(None), b"h2").unwrap();
    assert!(TlsConnector::from(other).connect(ServerName::try_from("localhost").unwrap(), stream).await.is_err());
    scene.fails("protocol", 2).await;
}

#[tokio::test]
async fn with_authorities_a_certificate_of_theirs_is_needed() {
    let Some(scene) = Scene::new(Some("ca"), 8).await else { return };
    assert!(scene.serves(Some("client")).await);
    assert!(!scene.serves(None).await);
    scene.fails("client_certificate", 1).await;
    assert!(!scene.serves(Some("stranger")).await);
    scene.fails("client_certificate", 2).await;
    assert!(scene.serves(Some("client")).await);
}

#[tokio::test]
async fn when_all_places_are_taken_the_oldest_makes_room() {
    let Some(scene) = Scene::new(None, 4).await else { return };
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(TcpStream::connect(scene.address).await.unwrap());
    }
    // 16 had to go already, this one takes the place of another, and its own is free again after it.
    scene.fails("crowded", 16).await;
    assert!(scene.serves(None).await);
    assert!(scene.serves(None).await);
    scene.fails("crowded", 17).await;
    let mut first = silent.remove(0);
    let closed = tokio::time::timeout(SOON, first.read(&mut [0; 1])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_client_is_cut_off() {
    let Some(scene) = Scene::new(None, 4).await else { return };
    let mut silent = TcpStream::connect(scene.address).await.unwrap();
    let closed = silent.read(&mut [0; 1]).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    assert_eq!(scene.failures("timeout"), 1);
}
