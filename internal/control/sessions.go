package control

import (
	"fmt"
	"net/http"
	"strings"

	"go.uber.org/zap"

	"kubevirt.io/disk/target"
)

// sessions are the methods of a target that list and end sessions.
type sessions interface {
	Sessions() []target.SessionInfo
	EndSessions(which func(target.SessionInfo) bool) []target.SessionInfo
}

// sessionControl answers the requests about sessions.
type sessionControl struct {
	target sessions
	log    *zap.Logger
}

func (c *sessionControl) list(w http.ResponseWriter, _ *http.Request, _ uint32) {
	answer(w, http.StatusOK, sessionsAnswer{c.target.Sessions()})
}

func (c *sessionControl) kick(w http.ResponseWriter, r *http.Request, user uint32) {
	var req Kick
	if !understand(w, r, &req) {
		return
	}
	if (req.Initiator == "") == (req.Session == 0) {
		answer(w, http.StatusBadRequest, refusal{"name an initiator or a session"})
		return
	}
	ended := c.target.EndSessions(func(s target.SessionInfo) bool {
		return s.TSIH == req.Session || strings.EqualFold(s.Initiator, req.Initiator)
	})
	if len(ended) == 0 {
		answer(w, http.StatusConflict, refusal{req.unknown()})
		return
	}
	for _, s := range ended {
		c.log.Info("an operator ended a session", zap.String("initiator", s.Initiator),
			zap.String("remote", s.Remote), zap.Uint16("tsih", s.TSIH), zap.Uint32("by_user", user))
	}
	answer(w, http.StatusOK, kickAnswer{ended})
}

func (k Kick) unknown() string {
	what := fmt.Sprintf("session %d", k.Session)
	if k.Initiator != "" {
		what = fmt.Sprintf("session of %q", k.Initiator)
	}
	return "there is no " + what + "; the command sessions lists the sessions"
}
