package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// closeTimeout is how long the browser may take to end.
const closeTimeout = 10 * time.Second

// Browser is a running Chromium. Its methods may be called by any number of goroutines.
type Browser struct {
	cmd  *exec.Cmd
	in   *os.File
	log  bytes.Buffer  // its standard error; complete when ended is closed
	done chan struct{} // closed when the pipe from the browser is

	mu      sync.Mutex
	last    int                    // guarded by mu; ID of a call
	waiting map[int]chan reply     // guarded by mu; by call
	pages   map[string]func(event) // guarded by mu; by session
}

type event struct {
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
}

type reply struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
	Session string `json:"sessionId"`
	event
}

// Start starts the Chromium of that name or path. dir is a new, empty directory for its profile.
func Start(path, dir string) (*Browser, error) {
	commands, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	out, events, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, commands.Close(), in.Close())
	}
	b := &Browser{in: in, done: make(chan struct{}), waiting: map[int]chan reply{},
		pages: map[string]func(event){}}
	b.cmd = exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
		"--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
		"--user-data-dir="+dir, "--remote-debugging-pipe", "about:blank")
	// Its settings and caches go there, too.
	b.cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir)
	b.cmd.ExtraFiles = []*os.File{commands, events} // descriptors 3 and 4
	b.cmd.Stderr = &b.log
	err = b.cmd.Start()
	err = errors.Join(err, commands.Close(), events.Close())
	if err != nil {
		return nil, errors.Join(err, in.Close(), out.Close())
	}
	go b.receive(out)
	return b, nil
}

// Close ends the browser and waits for it. An error has what it printed.
func (b *Browser) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = b.call(ctx, "", "Browser.close", nil, nil) // it may end before it answers
	select {
	case <-b.done:
	case <-ctx.Done():
		_ = b.cmd.Process.Kill()
		<-b.done
	}
	if err := errors.Join(b.in.Close(), b.cmd.Wait()); err != nil {
		return fmt.Errorf("chromium: %w\n%s", err, b.log.String())
	}
	return nil
}

// receive passes on the browser's messages until it ends. Messages end with a zero byte.
func (b *Browser) receive(out *os.File) {
	defer close(b.done)
	defer out.Close()
	for r := bufio.NewReader(out); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var m reply
		if json.Unmarshal(text[:len(text)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		waiting, page := b.waiting[m.ID], b.pages[m.Session]
		delete(b.waiting, m.ID)
		b.mu.Unlock()
		switch {
		case waiting != nil:
			waiting <- m
		case page != nil && m.Method != "":
			page(m.event)
		}
	}
}

// call makes a call of the protocol and waits for its result. result may be nil.
func (b *Browser) call(ctx context.Context, session, method string, params, result any) error {
	answer := make(chan reply, 1)
	b.mu.Lock()
	b.last++
	message := map[string]any{"id": b.last, "method": method}
	if params != nil {
		message["params"] = params
	}
	if session != "" {
		message["sessionId"] = session
	}
	b.waiting[b.last] = answer
	text, err := json.Marshal(message)
	if err == nil {
		_, err = b.in.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case m := <-answer:
		if m.Error != nil {
			return fmt.Errorf("%s: %s", method, m.Error.Message)
		}
		if result == nil {
			return nil
		}
		return json.Unmarshal(m.Result, result)
	case <-b.done:
		return fmt.Errorf("%s: the browser has ended: %w", method, io.EOF)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}
