//! The objects for Envoy Gateway carry safe values, the same as the shipped Envoy file; and what they make of Envoy does what it
//! should, shown with a real one.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::{ALL, TLS, bytes, groups, list, object, of_kind, rendered, seconds, text, variables, word, yaml};
use crate::harness::envoy::{Envoy, EnvoyOptions, SHIPPED_FILE, shipped_text, validate};
use crate::harness::http::Call;
use crate::harness::processor::{Action, Processor, chat};
use crate::harness::raw::RawServer;

const POLICY: &str = "aibrix-gateway-plugins-extension-policy";
/// What Envoy Gateway calls the filter that it makes of the policy.
const FILTER: &str = "envoy.filters.http.ext_proc/envoyextensionpolicy/aibrix-system/\
                      aibrix-gateway-plugins-extension-policy/extproc/0";
/// Where the settings of the HTTP connection manager are, whether a filter that limits connections comes first or not.
const MANAGER: &str =
    "$.default_filter_chain.filters[?(@.name=='envoy.filters.network.http_connection_manager')].typed_config";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// The parts of the shipped Envoy file.
struct Shipped {
    listener: Value,
    manager: Value,
    filter: Value,
    clusters: Value,
}

impl Shipped {
    fn read() -> Shipped {
        let config: Value = serde_saphyr::from_str(&shipped_text(SHIPPED_FILE, false)).expect("the shipped file");
        let listener = config["static_resources"]["listeners"][0].clone();
        let manager = listener["filter_chains"][0]["filters"][0]["typed_config"].clone();
        let filter = manager["http_filters"][0]["typed_config"].clone();
        Shipped { listener, manager, filter, clusters: config["static_resources"]["clusters"].clone() }
    }

    fn cluster(&self, name: &str) -> &Value {
        list(&self.clusters).iter().find(|cluster| cluster["name"] == name).expect(name)
    }

    fn stripped(&self) -> BTreeSet<&str> {
        let mutations = &self.manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
        list(mutations)
            .iter()
            .filter(|mutation| mutation["remove"].is_string())
            .map(|mutation| word(&mutation["remove"]))
            .collect()
    }
}

/// Groups with objects of Envoy Gateway; with the name of the Gateway.
fn with_envoy_gateway() -> Vec<(String, &'static Vec<Value>, String)> {
    let found = groups().filter_map(|(group, objects)| {
        let patch = of_kind(objects, "EnvoyPatchPolicy");
        let gateway = word(&patch.first()?["spec"]["targetRef"]["name"]).to_owned();
        Some((group, objects, gateway))
    });
    let found: Vec<_> = found.collect();
    assert!(found.len() >= 7);
    found
}

fn patch<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let patches = list(&object(objects, "EnvoyPatchPolicy", "aibrix-epp")["spec"]["jsonPatches"]);
    let fits = |patch: &&Value| {
        let operation = &patch["operation"];
        word(&patch["type"]).ends_with(kind)
            && (operation["value"]["name"] == name || word(&operation["path"]).ends_with(name))
    };
    &patches.iter().find(fits).unwrap_or_else(|| panic!("no patch for {kind} {name}"))["operation"]["value"]
}

#[test]
fn envoys_objects_have_the_names_that_aibrix_gives_them() {
    for (kind, name) in [
        ("HTTPRoute", "aibrix-reserved-router"),
        ("EnvoyExtensionPolicy", POLICY),
        ("EnvoyPatchPolicy", "aibrix-epp"),
        ("ClientTrafficPolicy", "aibrix-client-connection-buffersize"),
        ("BackendTrafficPolicy", "aibrix-backend-connection-policy"),
        ("GatewayClass", "aibrix-eg"),
        ("Gateway", "aibrix-eg"),
        ("EnvoyProxy", "aibrix-custom-proxy-config"),
        ("Deployment", "aibrix-redis-master"),
        ("Service", "aibrix-redis-master"),
    ] {
        object(&rendered().kustomize[ALL], kind, name);
    }
}

#[test]
fn r81_the_filter_fails_closed_and_waits_for_the_prefill() {
    let shipped = Shipped::read();
    for (group, objects, gateway) in with_envoy_gateway() {
        let policy = &object(objects, "EnvoyExtensionPolicy", POLICY)["spec"];
        assert_eq!(
            policy["targetRefs"],
            json!([{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "aibrix-reserved-router"}])
        );
        let [filter] = list(&policy["extProc"]) else { panic!("{group}: one filter, {FILTER}") };
        assert_eq!(filter["failOpen"], false, "{group}");
        let mode = json!({"allowModeOverride": true, "request": {"body": "Buffered"},
            "response": {"body": "Streamed", "attributes": shipped.filter["response_attributes"]}});
        assert_eq!(filter["processingMode"], mode, "{group}");
        let workloads = objects.iter().filter(|object| ["Deployment", "StatefulSet"].contains(&word(&object["kind"])));
        let containers = workloads.map(|workload| &workload["spec"]["template"]["spec"]["containers"][0]);
        if let Some(container) = containers.into_iter().find(|container| container["name"] == "gateway-plugin") {
            let prefill: u64 =
                variables(container)["AIBRIX_PREFILL_REQUEST_TIMEOUT"].expect("a value").parse().unwrap();
            let timeout = seconds(&filter["messageTimeout"]);
            assert!(timeout >= Duration::from_secs(prefill + 10), "{group}: {timeout:?} for a prefill of {prefill} s");
            let service = word(&filter["backendRefs"][0]["name"]);
            let service = object(objects, "Service", service);
            assert!(
                list(&service["spec"]["ports"]).iter().any(|port| port["port"] == filter["backendRefs"][0]["port"])
            );
        }
        let route = object(objects, "HTTPRoute", "aibrix-reserved-router");
        assert_eq!(route["spec"]["parentRefs"][0]["name"], *gateway, "{group}");
    }
}

#[test]
fn r83_replicas_are_checked_balanced_and_ejected_as_in_the_shipped_file() {
    let shipped = Shipped::read();
    let cluster = shipped.cluster("tandem");
    let (check, outlier) = (&cluster["health_checks"][0], &cluster["outlier_detection"]);
    let protocol =
        &cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    let http2 = &protocol["explicit_http_config"]["http2_protocol_options"];
    for (group, objects, _) in with_envoy_gateway() {
        let settings = &object(objects, "EnvoyExtensionPolicy", POLICY)["spec"]["extProc"][0]["backendSettings"];
        let circuit = &settings["circuitBreaker"];
        let breakers = &cluster["circuit_breakers"]["thresholds"][0];
        let pairs = [
            ("maxConnections", "max_connections"),
            ("maxPendingRequests", "max_pending_requests"),
            ("maxParallelRequests", "max_requests"),
            ("maxParallelRetries", "max_retries"),
        ];
        for (theirs, ours) in pairs {
            assert_eq!(circuit[theirs], breakers[ours], "{group}: {theirs}");
        }
        assert_eq!(circuit.as_object().map(serde_json::Map::len), Some(pairs.len()));
        let health = &settings["healthCheck"];
        assert_eq!(health["panicThreshold"], cluster["common_lb_config"]["healthy_panic_threshold"]["value"]);
        assert_eq!(health["active"]["grpc"]["service"], check["grpc_health_check"]["service_name"]);
        for (theirs, ours) in [
            ("interval", "interval"),
            ("timeout", "timeout"),
            ("unhealthyThreshold", "unhealthy_threshold"),
            ("healthyThreshold", "healthy_threshold"),
        ] {
            assert_eq!(health["active"][theirs], check[ours], "{group}: {theirs}");
        }
        let passive = &health["passive"];
        for (theirs, ours) in [
            ("splitExternalLocalOriginErrors", "split_external_local_origin_errors"),
            ("consecutiveLocalOriginFailures", "consecutive_local_origin_failure"),
            ("interval", "interval"),
            ("baseEjectionTime", "base_ejection_time"),
            ("maxEjectionPercent", "max_ejection_percent"),
        ] {
            assert_eq!(passive[theirs], outlier[ours], "{group}: {theirs}");
        }
        // Streams that Tandem cuts must not eject it.
        assert_eq!(passive["consecutiveGatewayErrors"], 0);
        assert!(passive["consecutive5XxErrors"].as_u64() >= Some(1_000_000_000));
        assert_eq!(settings["loadBalancer"]["type"], "LeastRequest");
        assert_eq!(settings["timeout"]["tcp"]["connectTimeout"], cluster["connect_timeout"]);
        assert_eq!(settings["http2"]["maxConcurrentStreams"], http2["max_concurrent_streams"]);
        for (theirs, ours) in [
            ("initialStreamWindowSize", "initial_stream_window_size"),
            ("initialConnectionWindowSize", "initial_connection_window_size"),
        ] {
            assert_eq!(Some(bytes(&settings["http2"][theirs])), http2[ours].as_u64(), "{group}: {theirs}");
        }
        // Envoy Gateway has no word for it; it would bound the whole answer.
        assert!(settings["timeout"]["http"].is_null() && settings["retry"].is_null(), "{group}");
    }
}

#[test]
fn the_listener_strips_buffers_and_limits_as_in_the_shipped_file() {
    let shipped = Shipped::read();
    let (manager, stripped) = (&shipped.manager, shipped.stripped());
    for (group, objects, gateway) in with_envoy_gateway() {
        let policy = &object(objects, "ClientTrafficPolicy", "aibrix-client-connection-buffersize")["spec"];
        assert_eq!(
            policy["targetRefs"][0]["name"], *gateway,
            "{group}: all routes of the Gateway, AIBrix's own included"
        );
        let removed: BTreeSet<&str> =
            list(&policy["headers"]["earlyRequestHeaders"]["remove"]).iter().map(word).collect();
        // The kind of that list allows no more.
        assert!(removed.len() <= 16 && removed.is_subset(&stripped), "{group}: {removed:?}");
        // A caller's id that nobody but the caller wrote says nothing but what the caller calls the request.
        let harmless = |name: &str| name.starts_with("x-envoy-") || name == "x-tandem-caller-request-id";
        let left: Vec<_> = stripped.difference(&removed).filter(|name| !harmless(name)).collect();
        assert!(left.is_empty(), "{group}: not stripped: {left:?}");
        for name in ["target-pod", "x-envoy-retry-on", "x-envoy-max-retries", "x-envoy-original-dst-host"] {
            assert!(removed.contains(name), "{group}: {name}");
        }
        assert_eq!(
            Some(bytes(&policy["connection"]["bufferLimit"])),
            shipped.listener["per_connection_buffer_limit_bytes"].as_u64()
        );
        let http2 = &manager["http2_protocol_options"];
        assert_eq!(policy["http2"]["maxConcurrentStreams"], http2["max_concurrent_streams"]);
        assert_eq!(
            Some(bytes(&policy["http2"]["initialStreamWindowSize"])),
            http2["initial_stream_window_size"].as_u64()
        );
        assert_eq!(policy["timeout"]["http"]["requestReceivedTimeout"], manager["request_timeout"]);
        assert_eq!(policy["timeout"]["http"]["idleTimeout"], manager["common_http_protocol_options"]["idle_timeout"]);
        assert_eq!(patch(objects, "Listener", "delayed_close_timeout"), &manager["delayed_close_timeout"]);
        assert_eq!(patch(objects, "Listener", "preserve_external_request_id"), &json!(false));

        let backend = &object(objects, "BackendTrafficPolicy", "aibrix-backend-connection-policy")["spec"];
        assert_eq!(backend["timeout"]["http"]["requestTimeout"], "0s", "{group}");
        assert_eq!((&backend["retry"], &backend["circuitBreaker"]["maxParallelRetries"]), (&Value::Null, &json!(0)));
        assert!(backend["circuitBreaker"]["maxParallelRequests"].as_u64() >= Some(100_000));
    }
}

#[test]
fn the_way_to_the_pods_is_that_of_the_shipped_file() {
    let shipped = Shipped::read();
    let routed = &shipped.manager["route_config"]["virtual_hosts"][0]["routes"][0];
    let named = |route: &str| {
        let paths = text("src/request/endpoint.rs");
        assert!(paths.contains(&format!("=> \"{route}\"")), "{route} is no path of Tandem");
    };
    for (group, objects, gateway) in with_envoy_gateway() {
        assert_eq!(
            patch(objects, "Cluster", "original_destination_cluster"),
            shipped.cluster("original_destination_cluster"),
            "{group}"
        );
        let route = patch(objects, "RouteConfiguration", "original_route");
        assert_eq!((&route["match"], &route["route"]), (&routed["match"], &routed["route"]), "{group}");
        // Patched in front of one another: the last is matched first.
        let patches = list(&object(objects, "EnvoyPatchPolicy", "aibrix-epp")["spec"]["jsonPatches"]);
        let routes = patches.iter().filter(|patch| word(&patch["type"]).ends_with("RouteConfiguration"));
        let names: Vec<_> = routes
            .map(|patch| (&patch["name"], &patch["operation"]["path"], &patch["operation"]["value"]["name"]))
            .collect();
        let configuration = json!(format!("aibrix-system/{gateway}/http"));
        let first = json!("/virtual_hosts/0/routes/0");
        assert_eq!(
            names,
            [(&configuration, &first, &json!("named_strategy")), (&configuration, &first, &json!("original_route"))],
            "{group}"
        );
        // A client that names a strategy, or a pod, does not get around Tandem.
        for name in ["original_route", "named_strategy"] {
            let route = patch(objects, "RouteConfiguration", name);
            let filters = route["typed_per_filter_config"].as_object().expect("filters");
            let enabled = json!({"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}});
            assert_eq!(filters.iter().collect::<Vec<_>>(), [(&FILTER.to_owned(), &enabled)], "{group}: {name}");
        }
        assert!(patch(objects, "RouteConfiguration", "named_strategy")["route"].is_null(), "it dials nobody");
        let matches = &object(objects, "HTTPRoute", "aibrix-reserved-router")["spec"]["rules"][0]["matches"];
        let paths: Vec<_> = list(matches).iter().map(|found| word(&found["path"]["value"])).collect();
        for path in &paths {
            named(path);
        }
        for endpoint in tandem::request::Endpoint::ALL.map(tandem::request::Endpoint::path) {
            let below = |prefix: &&str| {
                endpoint.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            assert!(paths.iter().any(below), "{group}: {endpoint}");
        }
        for proxy in of_kind(objects, "EnvoyProxy") {
            assert!(seconds(&proxy["spec"]["shutdown"]["drainTimeout"]) >= Duration::from_mins(5), "{group}");
        }
    }
}

#[test]
fn with_tls_both_sides_show_a_certificate_on_the_port_of_ext_proc() {
    for objects in [&rendered().kustomize[TLS], &rendered().helm["tls"]] {
        let workload = object(objects, "Deployment", "tandem-gateway");
        let container = &workload["spec"]["template"]["spec"]["containers"][0];
        let (variables, mount) = (variables(container), word(&container["volumeMounts"][0]["mountPath"]));
        let files = [("CERT", "tls.crt"), ("KEY", "tls.key"), ("CLIENT_CA", "ca.crt")];
        for (name, file) in files {
            let expected = format!("{mount}/{file}");
            assert_eq!(variables[&*format!("TANDEM_GRPC_TLS_{name}")], Some(&*expected));
        }
        // Probes and scrapes are not part of it.
        assert!(variables.keys().all(|name| !name.starts_with("TANDEM_HTTP_TLS")));
        let policy = &object(objects, "BackendTLSPolicy", "tandem-gateway")["spec"];
        let service = object(objects, "Service", word(&policy["targetRefs"][0]["name"]));
        assert_eq!(policy["targetRefs"][0]["sectionName"], service["spec"]["ports"][0]["name"]);
        assert_eq!(service["spec"]["ports"][0]["port"], 50052);
        assert!(service["spec"]["ports"][0]["appProtocol"].is_null(), "which would say: in the clear");
        let secret = &workload["spec"]["template"]["spec"]["volumes"][0]["secret"];
        assert_eq!(policy["validation"]["caCertificateRefs"][0]["name"], secret["secretName"]);
        let proxy = &object(objects, "EnvoyProxy", "aibrix-custom-proxy-config")["spec"]["backendTLS"];
        assert_eq!(proxy["clientCertificateRef"]["kind"], "Secret");
    }
}

/// What Envoy Gateway makes of the objects, in the place of the shipped file's own: the filter disabled but where a route
/// enables it, the routes of the HTTPRoutes, and the patches.
fn as_envoy_gateway(config: &mut Value) {
    let folder = "deploy/kubernetes/envoy-gateway";
    let [policy, client, patches, route] = ["extension-policy", "client-traffic-policy", "patch-policy", "route"]
        .map(|name| yaml(&format!("{folder}/{name}.yaml")));
    let enabled = json!({FILTER: {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}});
    let listener = &mut config["static_resources"]["listeners"][0];
    listener["per_connection_buffer_limit_bytes"] = bytes(&client["spec"]["connection"]["bufferLimit"]).into();
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    let filter = &mut manager["http_filters"][0];
    filter["name"] = FILTER.into();
    filter["disabled"] = true.into();
    let settings = filter["typed_config"].as_object_mut().expect("the filter");
    for unset in ["max_message_timeout", "mutation_rules", "status_on_error"] {
        assert!(settings.remove(unset).is_some(), "{unset}");
    }
    settings.insert("message_timeout".to_owned(), policy["spec"]["extProc"][0]["messageTimeout"].clone());
    let removed = list(&client["spec"]["headers"]["earlyRequestHeaders"]["remove"]);
    let removed: Vec<Value> = removed.iter().map(|name| json!({"remove": name})).collect();
    manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"] = removed.into();
    let mut routes: Vec<Value> = list(&route["spec"]["rules"][0]["matches"])
        .iter()
        .map(|found| {
            json!({"match": {"path_separated_prefix": found["path"]["value"]},
            "route": {"cluster": "tandem_http"}, "typed_per_filter_config": enabled})
        })
        .collect();
    routes.push(json!({"match": {"path_separated_prefix": "/v1/models"}, "route": {"cluster": "tandem_http"}}));
    manager["route_config"]["virtual_hosts"][0]["routes"] = routes.into();
    for patch in list(&patches["spec"]["jsonPatches"]) {
        let (operation, manager) = (
            &patch["operation"],
            &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"],
        );
        match word(&patch["type"]).rsplit('.').next() {
            Some("RouteConfiguration") => {
                let routes = manager["route_config"]["virtual_hosts"][0]["routes"].as_array_mut().expect("routes");
                routes.insert(0, operation["value"].clone());
            }
            Some("Listener") => {
                assert_eq!(operation["jsonPath"], MANAGER);
                manager[word(&operation["path"])] = operation["value"].clone();
            }
            Some("Cluster") => {
                let clusters = config["static_resources"]["clusters"].as_array_mut().expect("clusters");
                clusters.retain(|cluster| cluster["name"] != operation["value"]["name"]);
                clusters.push(operation["value"].clone());
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn envoy_before(processor: &Processor, admin: &RawServer) -> Envoy {
    Envoy::start_with(EnvoyOptions {
        failover: None,
        tandem_grpc: vec![processor.address()],
        tandem_http: admin.address(),
        healthy: None,
        otel: None,
        edit: Some(as_envoy_gateway),
    })
    .await
}

#[test]
fn envoy_accepts_what_the_patches_make_of_it() {
    let mut config: Value = serde_saphyr::from_str(&shipped_text(SHIPPED_FILE, false)).expect("the shipped file");
    as_envoy_gateway(&mut config);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("envoy.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let (accepted, output) = validate(&file);
    assert!(accepted, "{output}");
    assert!(!output.to_ascii_lowercase().contains("deprecated"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_get_around_the_gateway() {
    let (secret, admin) = (RawServer::answering(OK).await, RawServer::answering(OK).await);
    let processor = Processor::start(vec![Action::Pass]).await;
    let envoy = envoy_before(&processor, &admin).await;
    let target = secret.address().to_string();
    let mut passed = 0;
    // A path with a route, one that AIBrix gives none, and one that nobody knows.
    for path in ["/v1/chat/completions", "/generate", "/v1/unheard-of"] {
        for strategy in [None, Some("pd"), Some("")] {
            let mut call = Call::post(&envoy.base(), path, r#"{"model":"m"}"#).header("target-pod", &target);
            call = call.header("Target-Pod", &target).header("x-envoy-original-dst-host", &target);
            if let Some(strategy) = strategy {
                call = call.header("routing-strategy", strategy);
            }
            // With a strategy on a path without a route, the gateway is asked, and then nobody is there.
            passed += usize::from(path != "/v1/unheard-of" || strategy.is_some());
            let answer = call.send().await;
            // A request that the gateway lets pass goes to the backend of its route, if it has one: here, the admin port.
            let routed = path != "/v1/unheard-of" && strategy.is_none();
            assert_eq!(answer.status, if routed { 200 } else { 404 }, "{path} {strategy:?}");
            assert_eq!(processor.seen().len(), passed, "{path} {strategy:?}");
        }
    }
    for seen in processor.seen() {
        assert!(seen.headers.iter().all(|(name, _)| name != "target-pod" && name != "x-envoy-original-dst-host"));
    }
    assert!(secret.connections().is_empty());
    // The list of models has its own route, strategy or not.
    for headers in [vec![], vec![("routing-strategy", "pd")]] {
        let call = headers
            .into_iter()
            .fold(Call::get(&envoy.base(), "/v1/models"), |call, (name, value)| call.header(name, value));
        assert_eq!(call.send().await.status, 200);
    }
    assert_eq!(processor.seen().len(), passed);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_reach_their_pod_and_a_long_prefill_is_waited_for() {
    let (engine, admin) = (RawServer::answering(OK).await, RawServer::answering(OK).await);
    // Six seconds: more than the shipped file's message timeout, of which nothing is left here.
    let late = Action::RouteLate { pod: engine.address(), more: Duration::from_mins(1), wait: Duration::from_secs(6) };
    let processor = Processor::start(vec![late, Action::Route(engine.address()), Action::Answer(429, "{}")]).await;
    let envoy = envoy_before(&processor, &admin).await;
    assert_eq!(chat(envoy.address()).send().await.status, 200);
    let call = Call::post(&envoy.base(), "/v1/messages", r#"{"model":"m"}"#).header("routing-strategy", "pd");
    assert_eq!(call.send().await.status, 200);
    assert_eq!(engine.connections().iter().filter(|connection| connection.done).count(), 2);
    assert_eq!(chat(envoy.address()).send().await.status, 429);
    assert!(admin.connections().is_empty());
}
