// Package browser drives a headless Chromium for the tests, by the DevTools protocol over a pipe:
// https://chromedevtools.github.io/devtools-protocol. Start it, make a Page for each page, and
// Close it at the end. What a page complains of, such as an error of a script or something that the
// Content-Security-Policy forbids, is in its Complaints.
package browser
