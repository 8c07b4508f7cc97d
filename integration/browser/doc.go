// Package browser drives a headless Chromium for the tests, with the DevTools protocol over a pipe:
// https://chromedevtools.github.io/devtools-protocol. Start it, make a Page for each page, and
// Close it at the end. The Complaints of a page have its problems, such as an error in a script or
// a violation of the Content-Security-Policy.
package browser
