// Package pages reports the state of a daemon over HTTP: / is a page for people (Page), /status is
// for programs, /healthz and /readyz are for probes. Package metrics makes the Prometheus series.
//
// A daemon makes a mux, lets Register and Page.Register add the pages, adds its own, and serves the
// mux with NewServer. A Page measures until Stop. Package status has the types of /status. A client
// compares ContainerHeader with Container to find out whether the daemon runs in its own container.
//
// The page for people is a template, a style sheet and a script. The server makes every text and
// every picture (view), once for the page as it is loaded, and then as events with the changes
// (live). The script only puts them in their places. If the page gets other parts, such as one more
// LUN, the script loads the page again.
//
// No page waits long for a disk or holds a secret, and none changes anything. Slow, silent or many
// clients cost the daemon little.
package pages
