package browser

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// Page is a tab of the browser.
type Page struct {
	b       *Browser
	session string

	mu         sync.Mutex
	complaints []string // guarded by mu
}

// Options say how a page is shown.
type Options struct {
	Width, Height int
	Dark          bool
	NoScripts     bool
}

// Open opens a page at an address. The page may still be loading when Open returns.
func (b *Browser) Open(ctx context.Context, url string, opt Options) (*Page, error) {
	var target struct{ TargetID string }
	err := b.call(ctx, "", "Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	if err != nil {
		return nil, err
	}
	var attached struct{ SessionID string }
	err = b.call(ctx, "", "Target.attachToTarget",
		map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	if err != nil {
		return nil, err
	}
	p := &Page{b: b, session: attached.SessionID}
	b.mu.Lock()
	b.pages[p.session] = p.happened
	b.mu.Unlock()
	scheme := "light"
	if opt.Dark {
		scheme = "dark"
	}
	for _, c := range []struct {
		method string
		params map[string]any
	}{
		{"Page.enable", nil}, {"Runtime.enable", nil}, {"Log.enable", nil},
		{"Emulation.setDeviceMetricsOverride", map[string]any{"width": opt.Width,
			"height": opt.Height, "deviceScaleFactor": 1, "mobile": false}},
		{"Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{
			{"name": "prefers-color-scheme", "value": scheme}}}},
		{"Emulation.setScriptExecutionDisabled", map[string]any{"value": opt.NoScripts}},
		{"Page.navigate", map[string]any{"url": url}},
	} {
		if err := b.call(ctx, p.session, c.method, c.params, nil); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// happened handles an event of the page.
func (p *Page) happened(e event) {
	var complaint string
	switch e.Method {
	case "Runtime.exceptionThrown":
		complaint = string(e.Params)
	case "Log.entryAdded":
		var entry struct {
			Entry struct{ Level, Text, URL string }
		}
		if json.Unmarshal(e.Params, &entry) == nil && entry.Entry.Level != "info" &&
			entry.Entry.Level != "verbose" {
			complaint = entry.Entry.Text + " " + entry.Entry.URL
		}
	case "Runtime.consoleAPICalled":
		var call struct{ Type string }
		if json.Unmarshal(e.Params, &call) == nil && call.Type != "log" {
			complaint = string(e.Params)
		}
	}
	if complaint != "" {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.complaints = append(p.complaints, e.Method+": "+complaint)
	}
}

// Complaints returns the errors and warnings of the page so far.
func (p *Page) Complaints() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string{}, p.complaints...)
}

// Eval evaluates a JavaScript expression, waits for a promise, and stores the value in result. It
// also works if the page may not run scripts.
func (p *Page) Eval(ctx context.Context, expression string, result any) error {
	var answer struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	err := p.b.call(ctx, p.session, "Runtime.evaluate", map[string]any{"expression": expression,
		"returnByValue": true, "awaitPromise": true}, &answer)
	if err != nil {
		return err
	}
	if e := answer.ExceptionDetails; e != nil {
		return fmt.Errorf("%s: %s %s", expression, e.Text, e.Exception.Description)
	}
	if len(answer.Result.Value) == 0 {
		return fmt.Errorf("%s has no value", expression)
	}
	return json.Unmarshal(answer.Result.Value, result)
}

// Until waits until a JavaScript expression is true.
func (p *Page) Until(ctx context.Context, expression string) error {
	for {
		var is bool
		err := p.Eval(ctx, "!!("+expression+")", &is)
		if is {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not become true: %w, %v", expression, ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Press presses a key and lets it go, such as "Tab" or "Enter".
func (p *Page) Press(ctx context.Context, key string) error {
	codes := map[string]int{"Tab": 9, "Enter": 13}
	down := map[string]any{"type": "keyDown", "key": key, "code": key,
		"windowsVirtualKeyCode": codes[key]}
	if key == "Enter" {
		down["text"] = "\r"
	}
	if err := p.b.call(ctx, p.session, "Input.dispatchKeyEvent", down, nil); err != nil {
		return err
	}
	return p.b.call(ctx, p.session, "Input.dispatchKeyEvent", map[string]any{"type": "keyUp",
		"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}, nil)
}

// Screenshot returns the whole page as a PNG picture.
func (p *Page) Screenshot(ctx context.Context) ([]byte, error) {
	var layout struct {
		CSSContentSize struct{ Width, Height float64 }
	}
	if err := p.b.call(ctx, p.session, "Page.getLayoutMetrics", nil, &layout); err != nil {
		return nil, err
	}
	var picture struct{ Data string }
	err := p.b.call(ctx, p.session, "Page.captureScreenshot", map[string]any{"format": "png",
		"captureBeyondViewport": true, "clip": map[string]any{"x": 0, "y": 0, "scale": 1,
			"width": layout.CSSContentSize.Width, "height": layout.CSSContentSize.Height}},
		&picture)
	if err != nil {
		return nil, err
	}
	return base64.StdEncoding.DecodeString(picture.Data)
}
