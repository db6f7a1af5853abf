//! What files are taken, and what is said of the others.

use super::*;

#[test]
fn keys_of_the_usual_kinds_are_taken() {
    let Some(made) = Made::new() else { return };
    for (name, kind) in [
        ("rsa", "rsa:2048"),
        ("p256", "ec -pkeyopt ec_paramgen_curve:P-256"),
        ("p384", "ec -pkeyopt ec_paramgen_curve:P-384"),
        ("ed25519", "ed25519"),
    ] {
        made.certificate_with(name, "ca", kind);
        let pem = ServerPem::read(&made.files(name, None)).unwrap();
        let loaded = server(&pem, Listener::Front).unwrap();
        let serial = made.openssl(&format!("x509 -noout -serial -in {name}.crt"));
        let serial = serial.trim().strip_prefix("serial=").unwrap().to_lowercase();
        let facts = loaded.facts.unwrap();
        // A leading zero byte keeps the number positive.
        assert_eq!(facts.serial.trim_start_matches("00"), serial, "{name}");
        let now = i64::try_from(Clock::system().epoch_ms() / 1000).unwrap();
        let left = facts.expires - now - 2 * 24 * 3600;
        assert!((-120..=120).contains(&left), "{name}: {left}");
    }
}

#[test]
fn the_protocol_is_that_of_the_listener() {
    let Some(made) = Made::new() else { return };
    for (listener, protocol) in
        [(Listener::Grpc, &b"h2"[..]), (Listener::Http, b"http/1.1"), (Listener::Front, b"http/1.1")]
    {
        for client_ca in [None, Some("ca")] {
            let pem = ServerPem::read(&made.files("server", client_ca)).unwrap();
            let config = server(&pem, listener).unwrap().config;
            assert_eq!(config.alpn_protocols, [protocol.to_vec()]);
            // Who must show a certificate shows it at each connection.
            let resumes = config.session_storage.can_cache() && config.send_tls13_tickets > 0;
            assert_eq!(resumes, client_ca.is_none(), "{listener:?} {client_ca:?}");
        }
    }
}

/// Files that cannot be used are named, with what is wrong and nothing of what they hold.
#[test]
fn what_cannot_be_used_is_told_precisely() {
    let Some(made) = Made::new() else { return };
    made.certificate("other", "ca");
    let write = |name: &str, text: &str| std::fs::write(made.path(name), text).unwrap();
    let frame = |label: &str, text: &str| format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n");
    write("empty", "");
    write("text", "hunter2 is no certificate\n");
    write("broken", "-----BEGIN CERTIFICATE-----\nhunter2\n");
    write("wrong", &frame("CERTIFICATE", "aHVudGVyMg=="));
    write("wrong-key", &frame("PRIVATE KEY", "aHVudGVyMg=="));
    write("long", &"hunter2\n".repeat(1 << 18));
    made.openssl("pkcs8 -topk8 -in server.key -out encrypted.key -passout pass:hunter2");
    let (cert, key, ca) = ("server.crt", "server.key", "ca.crt");
    for (files, expected) in [
        ([cert, "other.key", ca], "the private key in other.key does not belong to the certificate in server.crt"),
        (["nowhere", key, ca], "nowhere cannot be read: entity not found"),
        ([cert, "nowhere", ca], "nowhere cannot be read: entity not found"),
        ([cert, key, "nowhere"], "nowhere cannot be read: entity not found"),
        (["long", key, ca], "long is longer than 1048576 bytes"),
        (["empty", key, ca], "empty holds no certificate in PEM form, or one that is damaged"),
        (["text", key, ca], "text holds no certificate in PEM form, or one that is damaged"),
        (["broken", key, ca], "broken holds no certificate in PEM form, or one that is damaged"),
        ([key, key, ca], "server.key holds no certificate in PEM form, or one that is damaged"),
        ([cert, cert, ca], "server.crt holds no unencrypted private key in PEM form"),
        ([cert, "encrypted.key", ca], "encrypted.key holds no unencrypted private key in PEM form"),
        (
            [cert, "wrong-key", ca],
            "wrong-key holds a private key that cannot be used (RSA, ECDSA P-256/P-384 and Ed25519 can)",
        ),
        (["wrong", key, ca], "wrong holds a certificate that cannot be used"),
        ([cert, key, "wrong"], "wrong holds a certificate that cannot be used"),
        ([cert, key, key], "server.key holds no certificate in PEM form, or one that is damaged"),
    ] {
        let [cert, key, client_ca] = files.map(|name| made.path(name));
        let files = TlsFiles { cert, key, client_ca: Some(client_ca) };
        let error = ServerPem::read(&files).and_then(|pem| server(&pem, Listener::Grpc)).unwrap_err();
        let told = error.to_string().replace(&format!("{}/", made.0.path().display()), "");
        assert!(told.starts_with(expected), "{told}, not {expected}");
        assert!(!format!("{told} {error:?}").contains("hunter2"), "{error:?}");
    }
    let shown = format!("{:?}", ServerPem::read(&made.files("server", None)).unwrap());
    assert!(!shown.contains("bytes") && !shown.contains("BEGIN"), "{shown}");
}

#[test]
fn a_client_needs_all_of_its_files() {
    let Some(made) = Made::new() else { return };
    assert!(client(&made.client(None), b"h2").is_ok());
    assert!(client(&made.client(Some("client")), b"h2").is_ok());
    assert!(client(&ClientFiles { skip_verify: true, ..ClientFiles::default() }, b"h2").is_ok());
    let half = ClientFiles { key: None, ..made.client(Some("client")) };
    assert_eq!(client(&half, b"h2").unwrap_err(), TlsError::NotAPair { file: made.path("client.crt") });
    let half = ClientFiles { cert: None, ..made.client(Some("client")) };
    assert_eq!(client(&half, b"h2").unwrap_err(), TlsError::NotAPair { file: made.path("client.key") });
    let mixed = ClientFiles { key: Some(made.path("server.key")), ..made.client(Some("client")) };
    assert!(matches!(client(&mixed, b"h2").unwrap_err(), TlsError::Mismatch { .. }));
}
